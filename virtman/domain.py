"""The libvirt domain of a VM, as XML (libvirt: formatdomain.html)."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

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
ALIAS = f"ua-{OURS}"
"""How libvirt's names begin of the disks that VirtMan gives to a VM; "ua-" is libvirt's for those of its users."""

NEWEST = "q35"
"""The newest machine that a QEMU has: libvirt puts that one's own name in its place."""

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

    @property
    def mac(self) -> str:
        """The address of its network card."""
        return mac_of(self.uuid)


def mac_of(uuid: str) -> str:
    """A locally administered unicast address (IEEE 802: second-lowest bit of the first byte) of 40 hashed bits."""
    digest = hashlib.sha256(uuid.encode()).digest()
    return ":".join(["02", *(f"{byte:02x}" for byte in digest[:5])])


def owner_of(xml: str) -> str | None:
    """Who defined the domain: the owner we put there, or None if it is not ours."""
    mark = ET.fromstring(xml).find(MARK)  # noqa: S314  libvirt wrote it
    return None if mark is None else mark.get("owner")


def machine_of(xml: str) -> Boot:
    """The machine that a domain of ours was defined with, from what libvirt makes of its definition."""
    return _machine_of(ET.fromstring(xml))  # noqa: S314  libvirt wrote it


def _machine_of(root: ET.Element) -> Boot:
    return Boot(
        memory=int(root.findtext("memory", "0")) // KIB_PER_MIB,
        cpus=int(root.findtext("vcpu", "1")),
        network=_network_of(root.find("devices/interface")),
    )


def hardware_of(xml: str) -> str:
    """QEMU's name of the machine that a domain emulates."""
    kind = ET.fromstring(xml).find("os/type")  # noqa: S314  libvirt wrote it
    return NEWEST if kind is None else kind.get("machine", NEWEST)


def firmware_of(xml: str) -> Path | None:
    """The file that libvirt has made for the variables of a domain's UEFI, if the domain has that."""
    file = ET.fromstring(xml).findtext("os/nvram")  # noqa: S314  libvirt wrote it
    return Path(file) if file else None


def with_firmware(xml: str, file: Path) -> str:
    """The definition of a domain with UEFI, whose variables are in another file."""
    root = ET.fromstring(xml)  # noqa: S314  libvirt wrote it
    _child(root, "os/nvram").text = str(file)
    return ET.tostring(root, encoding="unicode")


def has_tpm(xml: str) -> bool:
    """Whether libvirt keeps what a TPM of a domain remembers."""
    return ET.fromstring(xml).find("devices/tpm") is not None  # noqa: S314  libvirt wrote it


def is_emulated(xml: str) -> bool:
    """Whether QEMU itself does what the domain's processors do, and not KVM."""
    return ET.fromstring(xml).get("type") != "kvm"  # noqa: S314  libvirt wrote it


def _network_of(interface: ET.Element | None) -> str:
    if interface is None:
        return NONE
    kind, source = interface.get("type", ""), interface.find("source")
    name = None if source is None else source.get(kind)
    return kind if name is None else f"{kind}:{name}"


def domain_xml(machine: Machine) -> str:
    """The domain's first definition. Raises BadRequest for a network that is none of the kinds above."""
    return ET.tostring(_domain(machine), encoding="unicode")


def redefined(xml: str, machine: Machine) -> str:
    """The definition ``xml``, which libvirt gave, with what VirtMan owns in it as ``machine`` says.

    All else may be an administrator's (``virsh edit``), and stays. Memory, processors and network are put only where
    ``machine`` has others than the definition. Raises BadRequest as ``domain_xml``.
    """
    root = ET.fromstring(xml)  # noqa: S314  libvirt wrote it
    present = _machine_of(root)
    made = _domain(replace(machine, network=NONE) if machine.network == present.network else machine)
    if machine.memory != present.memory:
        _put(root, made, "memory")
        _put(root, made, "currentMemory")
    if machine.cpus != present.cpus:
        _put(root, made, "vcpu")
    if machine.network != present.network:
        _put(root, made, "devices/interface")
    _put_ours(root, made)
    return ET.tostring(root, encoding="unicode")


def arriving(xml: str, expected: str) -> str:
    """The definition ``xml`` of a VM here, with what VirtMan owns in it as another host's ``domain_xml`` has it."""
    root, made = ET.fromstring(xml), ET.fromstring(expected)  # noqa: S314  libvirt and an agent wrote them
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
            free = next(name for name in map(scsi_target, count()) if name not in taken)
            target.set("dev", free)
            taken.add(free)
        devices.append(disk)


def _child(element: ET.Element, path: str) -> ET.Element:
    """What libvirt, or ``_domain``, always writes."""
    found = element.find(path)
    if found is None:
        raise ValueError(f"no {path} in {element.tag}")
    return found


def _alias(disk: ET.Element) -> str:
    """libvirt's name of a disk, if somebody has given it one."""
    alias = disk.find("alias")
    return "" if alias is None else alias.get("name", "")


def _put_arguments(root: ET.Element, made: ET.Element) -> None:
    ours, present = _child(made, COMMAND_LINE), root.find(COMMAND_LINE)
    if present is None:
        root.append(ours)
        return
    for option, value in pairwise(present.findall(ARGUMENT)):
        if option.get("value") in ("-blockdev", "-device") and _is_ours(value.get("value", "")):
            present.remove(option)
            present.remove(value)
    present[:0] = list(ours)


def _is_ours(value: str) -> bool:
    """Whether a block node or a device, as QEMU's command line has them, is VirtMan's."""
    try:
        named = json.loads(value)
    except ValueError:
        return False  # QEMU's other way to write them: VirtMan has none in that
    return isinstance(named, dict) and str(named.get("node-name", named.get("id", ""))).startswith(OURS)


def _domain(machine: Machine) -> ET.Element:
    root = ET.Element("domain", type="kvm" if machine.accel == "kvm" else "qemu")
    _text(root, "name", machine.vm)
    _text(root, "uuid", machine.uuid)
    metadata = ET.SubElement(root, "metadata")
    ET.SubElement(metadata, f"{{{NAMESPACE}}}virtman", owner=machine.owner)
    _text(root, "memory", str(machine.memory), unit="MiB")
    _text(root, "vcpu", str(machine.cpus))
    _text(root, "iothreads", "1")
    os = ET.SubElement(root, "os")
    _text(os, "type", "hvm", arch="x86_64", machine=machine.hardware)
    features = ET.SubElement(root, "features")
    ET.SubElement(features, "acpi")
    if machine.accel == "kvm":
        ET.SubElement(root, "cpu", mode="host-passthrough")
    _text(root, "on_crash", "destroy")
    devices = ET.SubElement(root, "devices")
    _disks(root, devices, machine)
    _network(devices, machine)
    _console(devices, machine.console_log)
    _guest_agent(devices)
    rng = ET.SubElement(devices, "rng", model="virtio")
    _text(rng, "backend", "/dev/urandom", model="random")
    ET.SubElement(devices, "memballoon", model="none")
    return root


def _text(parent: ET.Element, tag: str, text: str, **attributes: str) -> None:
    ET.SubElement(parent, tag, attributes).text = text


def _disks(root: ET.Element, devices: ET.Element, machine: Machine) -> None:
    """The VM's disk and seed. On an error the VM stops and awaits its administrator; it is never told of one.

    A disk that QEMU opens as a block node is handed over as it is: libvirt before 9.1 drops the reconnect delay of NBD
    nodes, without which the VM would see an error when the host's storage daemon is started again. Bus 0 is scanned
    first, so that the disk is the guest's first one and the seed its second, whatever libvirt adds.
    """
    arguments = []
    if machine.disk.node is None:
        devices.append(_block_disk("disk", machine.disk, "vda", "virtio", iothread=IO_THREAD))
    else:
        arguments += _arguments("disk", machine.disk.node, "0x10")
    seed = {"driver": "raw", "read-only": True, "file": {"driver": "file", "filename": str(machine.seed)}}
    arguments += _arguments("seed", seed, "0x11")
    ET.SubElement(devices, "controller", type="scsi", index="0", model="virtio-scsi")
    for number, (name, disk) in enumerate(machine.disks.items()):
        if disk.node is None:
            devices.append(scsi_disk(name, disk, scsi_target(number)))
        else:
            node = {**disk.node, "node-name": hotplug.node_name(name)}
            arguments += ["-blockdev", json.dumps(node), "-device", json.dumps(hotplug.frontend(name))]
    command_line = ET.SubElement(root, COMMAND_LINE)
    for argument in arguments:
        ET.SubElement(command_line, ARGUMENT, value=argument)


def _arguments(name: str, node: Mapping[str, Any], address: str) -> list[str]:
    device = {"driver": "virtio-blk-pci", "id": f"{OURS}{name}", "drive": f"{OURS}{name}-node", "bus": "pcie.0"}
    device |= {"addr": address, "werror": "stop", "rerror": "stop"}
    more = {"bootindex": 1, "iothread": f"iothread{IO_THREAD}"} if name == "disk" else {}
    blockdev = {**node, "node-name": f"{OURS}{name}-node"}
    return ["-blockdev", json.dumps(blockdev), "-device", json.dumps(device | more)]


def _block_disk(name: str, disk: Device, target: str, bus: str, **driver: str) -> ET.Element:
    """A disk that is a device of the host: libvirt lets the VM's QEMU open it."""
    element = ET.Element("disk", type="block", device="disk")
    options = {"name": "qemu", "type": "raw", "cache": "none", "error_policy": "stop", "rerror_policy": "stop"}
    options["discard"] = "unmap"  # else QEMU drops what the guest discards
    ET.SubElement(element, "driver", options | driver)
    ET.SubElement(element, "source", dev=str(disk.path))
    ET.SubElement(element, "target", dev=target, bus=bus)
    ET.SubElement(element, "alias", name=f"{ALIAS}{name}")
    return element


def scsi_disk(name: str, disk: Device, target: str) -> ET.Element:
    """A further disk that is a device of the host. ``target``: how libvirt tells its disks apart."""
    element = _block_disk(f"with-{name}", disk, target, "scsi")
    _text(element, "serial", hotplug.serial(name))
    return element


def scsi_target(number: int) -> str:
    """sda to sdz, sdaa and so on."""
    letters = ""
    while number >= 0:
        number, letter = divmod(number, len(string.ascii_lowercase))
        letters, number = string.ascii_lowercase[letter] + letters, number - 1
    return f"sd{letters}"


def disks_of(xml: str) -> dict[str, str]:
    """The targets of a domain's disks that are devices of the host, by their paths."""
    disks = ET.fromstring(xml).iterfind("devices/disk")  # noqa: S314  libvirt wrote it
    found = [(disk.find("source"), disk.find("target")) for disk in disks]
    return {
        source.get("dev", ""): target.get("dev", "")
        for source, target in found
        if source is not None and target is not None
    }


def _network(devices: ET.Element, machine: Machine) -> None:
    kind, _, name = machine.network.partition(":")
    if machine.network == NONE:
        return
    if machine.network != USER and (kind not in ("network", "bridge") or not name):
        raise BadRequest(f"network {machine.network!r} is not one of: user, none, network:NAME, bridge:NAME")
    interface = ET.SubElement(devices, "interface", type=kind)
    ET.SubElement(interface, "mac", address=machine.mac)
    if name:
        ET.SubElement(interface, "source", {kind: name})
    ET.SubElement(interface, "model", type="virtio")
    ET.SubElement(interface, "rom", enabled="no")


def _console(devices: ET.Element, log: Path) -> None:
    """The serial port, for ``virtman console``; everything it prints is also kept in a file."""
    serial = ET.SubElement(devices, "serial", type="pty")
    ET.SubElement(serial, "log", file=str(log), append="off")
    ET.SubElement(serial, "target", port="0")
    console = ET.SubElement(devices, "console", type="pty")
    ET.SubElement(console, "target", type="serial", port="0")


def _guest_agent(devices: ET.Element) -> None:
    """Where libvirt reaches QEMU's guest agent, if one runs in the VM."""
    channel = ET.SubElement(devices, "channel", type="unix")
    ET.SubElement(channel, "target", type="virtio", name="org.qemu.guest_agent.0")
