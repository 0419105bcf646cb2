"""The libvirt domain of a VM, as XML (libvirt: formatdomain.html)."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape, quoteattr

from drivers.base import Device
from drivers.qemu import hotplug
from virtman.errors import BadRequest
from virtman.records import Boot

NAMESPACE = "https://virtman.invalid/domain/1"
"""Marks a domain as ours. It only has to be unique, and names no place."""

QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"

IO_THREAD = "1"
"""Serves the VM's disk: QEMU's main thread would wait for each step of a read for the lock of the VM's processors."""

KIB_PER_MIB = 1024
"""libvirt gives memory back in KiB, whatever it got."""

USER, NONE = "user", "none"

MARK = f"metadata/{{{NAMESPACE}}}virtman"
COMMAND_LINE, ARGUMENT = f"{{{QEMU_NAMESPACE}}}commandline", f"{{{QEMU_NAMESPACE}}}arg"
OURS = "virtman-"
"""How QEMU's IDs begin of what VirtMan gives to a VM besides libvirt's devices."""
_OUR_ID = re.compile(rf'"(id|node-name)": "{OURS}')
"""What the arguments have that VirtMan gives to QEMU for a disk, which are JSON."""
ALIAS = f"ua-{OURS}"
"""How libvirt's names begin of the disks that VirtMan gives to a VM; "ua-" is libvirt's for those of its users."""

GUEST_AGENT = "org.qemu.guest_agent.0"
"""How the port is called at which libvirt reaches QEMU's guest agent, if one runs in the VM."""

NEWEST = "q35"
"""The newest machine that a QEMU has: libvirt replaces this name by the name of that machine."""

ET.register_namespace("virtman", NAMESPACE)
ET.register_namespace("qemu", QEMU_NAMESPACE)


@dataclass(frozen=True)
class Machine:
    """A VM to define. ``memory`` in MiB; ``network`` is ``user``, ``none``, ``network:NAME`` or ``bridge:NAME``.

    ``disks``: those that it uses besides its own, by name. ``hardware``: QEMU's name of the machine that it emulates.
    """

    vm: str
    uuid: str
    owner: str
    disk: Device
    seed: Path
    console_log: Path
    accel: str
    memory: int
    cpus: int
    network: str
    disks: Mapping[str, Device] = field(default_factory=dict)
    hardware: str = NEWEST


def mac_of(uuid: str) -> str:
    """The address of a VM's network card: locally administered and unicast (IEEE 802: second-lowest bit of the first
    byte), of 40 hashed bits.
    """
    digest = hashlib.sha256(uuid.encode()).digest()
    return ":".join(["02", *(f"{byte:02x}" for byte in digest[:5])])


# What a definition says


def _parse(xml: str) -> ET.Element:
    return ET.fromstring(xml)  # noqa: S314  libvirt or an agent wrote it


def owner_of(xml: str) -> str | None:
    """Who defined the domain: the owner in VirtMan's mark, or None if VirtMan did not."""
    mark = _parse(xml).find(MARK)
    return None if mark is None else mark.get("owner")


def machine_of(xml: str) -> Boot:
    """The machine that a domain of ours was defined with, from what libvirt makes of its definition."""
    root = _parse(xml)
    return Boot(
        memory=int(root.findtext("memory", "0")) // KIB_PER_MIB,
        cpus=int(root.findtext("vcpu", "1")),
        network=_network_of(root.find("devices/interface")),
    )


def _network_of(interface: ET.Element | None) -> str:
    if interface is None:
        return NONE
    kind, source = interface.get("type", ""), interface.find("source")
    name = None if source is None else source.get(kind)
    return kind if name is None else f"{kind}:{name}"


def hardware_of(xml: str) -> str:
    """QEMU's name of the machine that a domain emulates."""
    kind = _parse(xml).find("os/type")
    return NEWEST if kind is None else kind.get("machine", NEWEST)


def firmware_of(xml: str) -> Path | None:
    """The file that libvirt has made for the variables of a domain's UEFI, if the domain has that."""
    file = _parse(xml).findtext("os/nvram")
    return Path(file) if file else None


def has_tpm(xml: str) -> bool:
    """Whether libvirt keeps what a TPM of a domain remembers."""
    return _parse(xml).find("devices/tpm") is not None


def is_emulated(xml: str) -> bool:
    """Whether QEMU itself does what the domain's processors do, and not KVM."""
    return _parse(xml).get("type") != "kvm"


def disks_of(xml: str) -> dict[str, str]:
    """The targets of a domain's disks that are devices of the host, by their paths."""
    disks = _parse(xml).iterfind("devices/disk[source][target]")
    return {_child(disk, "source").get("dev", ""): _child(disk, "target").get("dev", "") for disk in disks}


# Definitions that change


def with_firmware(xml: str, file: Path) -> str:
    """The definition of a domain with UEFI, whose variables are in another file."""
    root = _parse(xml)
    _child(root, "os/nvram").text = str(file)
    return ET.tostring(root, encoding="unicode")


def redefined(xml: str, machine: Machine) -> str:
    """The definition ``xml``, which libvirt gave, with what VirtMan owns in it as ``machine`` says.

    All else may be an administrator's (``virsh edit``), and stays. Memory, processors and network are put only where
    ``machine`` has others than the definition. Raises BadRequest as ``domain_xml``.
    """
    root, present = _parse(xml), machine_of(xml)
    same_network = machine.network == present.network
    made = _parse(domain_xml(replace(machine, network=NONE) if same_network else machine))
    changed = {
        "memory": machine.memory != present.memory,
        "currentMemory": machine.memory != present.memory,
        "vcpu": machine.cpus != present.cpus,
        "devices/interface": not same_network,
    }
    for path in (path for path, differs in changed.items() if differs):
        _put(root, made, path)
    _put_ours(root, made)
    return ET.tostring(root, encoding="unicode")


def arriving(xml: str, expected: str) -> str:
    """The definition ``xml`` of a VM here, with what VirtMan owns in it as another host's ``domain_xml`` has it."""
    root, made = _parse(xml), _parse(expected)
    _child(root, MARK).set("owner", _child(made, MARK).get("owner", ""))
    _put_ours(root, made)
    return ET.tostring(root, encoding="unicode")


def _put_ours(root: ET.Element, made: ET.Element) -> None:
    """Have in ``root`` what VirtMan owns as ``made`` has it: the accelerator, the disks, and the console's log."""
    if root.get("type") != made.get("type"):
        root.set("type", made.get("type", ""))
        _put(root, made, "cpu")  # what one accelerator knows the other one does not
    for needed in ("iothreads", "devices/controller[@type='scsi']"):
        if root.find(needed) is None:
            _put(root, made, needed)
    for port in ("serial", "console"):  # libvirt shows the first serial port as a console, too
        if (log := root.find(f"devices/{port}/log")) is not None:
            log.set("file", _child(made, "devices/serial/log").get("file", ""))
    _put_disks(_child(root, "devices"), made.iterfind("devices/disk"))
    _put_arguments(root, made)


def _put(root: ET.Element, made: ET.Element, path: str) -> None:
    """Have the first element of this path as ``made`` has it: at its place, or at the end; or not at all."""
    parent, present, wanted = _child(root, path.rpartition("/")[0] or "."), root.find(path), made.find(path)
    place = len(parent) if present is None else list(parent).index(present)
    if present is not None:
        parent.remove(present)
    if wanted is not None:
        parent.insert(place, wanted)


def _put_disks(devices: ET.Element, made: Iterable[ET.Element]) -> None:
    """An administrator may have said more of VirtMan's disks, and given the VM others."""
    present = {alias: disk for disk in devices.findall("disk") if (alias := _alias(disk)).startswith(ALIAS)}
    wanted = {_alias(disk): disk for disk in made}
    for alias in present.keys() - wanted.keys():
        devices.remove(present[alias])
    taken = {target.get("dev") for target in devices.iterfind("disk/target")}
    for alias, disk in wanted.items():
        if alias in present:
            for tag in ("source", "driver"):
                _child(present[alias], tag).attrib.update(_child(disk, tag).attrib)
            continue
        target = _child(disk, "target")
        if target.get("bus") == "scsi":
            target.set("dev", free_target(taken))
            taken.add(target.get("dev"))
        devices.append(disk)


def _child(element: ET.Element, path: str) -> ET.Element:
    """What libvirt and ``domain_xml`` always write."""
    found = element.find(path)
    if found is None:
        raise ValueError(f"no {path} in {element.tag}")
    return found


def _alias(disk: ET.Element) -> str:
    """libvirt's name of a disk, if the disk has one."""
    alias = disk.find("alias")
    return "" if alias is None else alias.get("name", "")


def _put_arguments(root: ET.Element, made: ET.Element) -> None:
    ours, present = _child(made, COMMAND_LINE), root.find(COMMAND_LINE)
    if present is None:
        root.append(ours)
        return
    for option, value in pairwise(present.findall(ARGUMENT)):
        if option.get("value") in ("-blockdev", "-device") and _OUR_ID.search(value.get("value", "")):
            present.remove(option)
            present.remove(value)
    present[:0] = list(ours)


# A new definition


def domain_xml(machine: Machine) -> str:
    """The domain's first definition. Raises BadRequest for a network that is none of the kinds above.

    On an error of a disk the VM stops and awaits its administrator; the VM is never told of the error.

    A disk that QEMU opens as a block node is handed over as it is: libvirt before 9.1 drops the reconnect delay of NBD
    nodes, without which the VM would see an error when the host's chunk store is started again. Bus 0 is scanned
    first, so that the disk is the guest's first one and the seed its second, whatever libvirt adds.
    """
    kvm = machine.accel == "kvm"
    disks, arguments = _disks(machine)
    options = "".join(f"<qemu:arg value={quoteattr(argument)}/>" for argument in arguments)
    xml = f"""
        <domain type="{"kvm" if kvm else "qemu"}" xmlns:qemu="{QEMU_NAMESPACE}" xmlns:virtman="{NAMESPACE}">
          <name>{escape(machine.vm)}</name>
          <uuid>{machine.uuid}</uuid>
          <metadata><virtman:virtman owner={quoteattr(machine.owner)}/></metadata>
          <memory unit="MiB">{machine.memory}</memory>
          <vcpu>{machine.cpus}</vcpu>
          <iothreads>1</iothreads>
          <os><type arch="x86_64" machine={quoteattr(machine.hardware)}>hvm</type></os>
          <features><acpi/></features>
          {'<cpu mode="host-passthrough"/>' if kvm else ""}
          <on_crash>destroy</on_crash>
          <devices>
            {"".join(disks)}
            <controller type="scsi" index="0" model="virtio-scsi"/>
            {_network(machine)}
            <serial type="pty">
              <log file={quoteattr(str(machine.console_log))} append="off"/>
              <target port="0"/>
            </serial>
            <console type="pty"><target type="serial" port="0"/></console>
            <channel type="unix"><target type="virtio" name="{GUEST_AGENT}"/></channel>
            <rng model="virtio"><backend model="random">/dev/urandom</backend></rng>
            <memballoon model="none"/>
          </devices>
          <qemu:commandline>{options}</qemu:commandline>
        </domain>"""
    return re.sub(r">\s+<", "><", xml.strip())


def _disks(machine: Machine) -> tuple[list[str], list[str]]:
    """The disks that libvirt knows, and the arguments by which QEMU gets the others."""
    disks, arguments = [], []
    if machine.disk.node is None:
        disks.append(_block_disk("disk", machine.disk, 'dev="vda" bus="virtio"', f'iothread="{IO_THREAD}"'))
    else:
        arguments += _arguments("disk", machine.disk.node, "0x10")
    seed = {"driver": "raw", "read-only": True, "file": {"driver": "file", "filename": str(machine.seed)}}
    arguments += _arguments("seed", seed, "0x11")
    for number, (name, disk) in enumerate(machine.disks.items()):
        if disk.node is None:
            disks.append(scsi_disk(name, disk, scsi_target(number)))
        else:
            node = {**disk.node, "node-name": hotplug.node_name(name)}
            arguments += ["-blockdev", json.dumps(node), "-device", json.dumps(hotplug.frontend(name))]
    return disks, arguments


def _arguments(name: str, node: Mapping[str, Any], address: str) -> list[str]:
    device = {"driver": "virtio-blk-pci", "id": f"{OURS}{name}", "drive": f"{OURS}{name}-node", "bus": "pcie.0"}
    device |= {"addr": address, "werror": "stop", "rerror": "stop"}
    more = {"bootindex": 1, "iothread": f"iothread{IO_THREAD}"} if name == "disk" else {}
    blockdev = {**node, "node-name": f"{OURS}{name}-node"}
    return ["-blockdev", json.dumps(blockdev), "-device", json.dumps(device | more)]


def _block_disk(name: str, disk: Device, target: str, driver: str = "", more: str = "") -> str:
    """A disk that is a device of the host: libvirt lets the VM's QEMU open it.

    Without ``discard`` QEMU drops what the guest discards.
    """
    return f"""
        <disk type="block" device="disk">
          <driver name="qemu" type="raw" cache="none" discard="unmap"
           error_policy="stop" rerror_policy="stop" {driver}/>
          <source dev={quoteattr(str(disk.path))}/>
          <target {target}/>
          {more}
          <alias name={quoteattr(ALIAS + name)}/>
        </disk>"""


def scsi_disk(name: str, disk: Device, target: str) -> str:
    """A further disk that is a device of the host. ``target``: how libvirt tells its disks apart."""
    serial = f"<serial>{escape(hotplug.serial(name))}</serial>"
    return _block_disk(f"with-{name}", disk, f'dev="{target}" bus="scsi"', more=serial)


def scsi_target(number: int) -> str:
    """sda to sdz, sdaa and so on."""
    letters = ""
    while number >= 0:
        number, letter = divmod(number, len(string.ascii_lowercase))
        letters, number = string.ascii_lowercase[letter] + letters, number - 1
    return f"sd{letters}"


def free_target(taken: Container[str | None]) -> str:
    """The first target of a SCSI disk that no disk has."""
    return next(name for name in map(scsi_target, count()) if name not in taken)


def _network(machine: Machine) -> str:
    kind, _, name = machine.network.partition(":")
    if machine.network == NONE:
        return ""
    if machine.network != USER and (kind not in ("network", "bridge") or not name):
        raise BadRequest(f"network {machine.network!r} is not one of: user, none, network:NAME, bridge:NAME")
    return f"""
        <interface type="{kind}">
          <mac address="{mac_of(machine.uuid)}"/>
          {f"<source {kind}={quoteattr(name)}/>" if name else ""}
          <model type="virtio"/>
          <rom enabled="no"/>
        </interface>"""
