"""The libvirt domain of a VM, as XML (libvirt: formatdomain.html)."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from drivers.base import Device
from virtman.errors import BadRequest

NAMESPACE = "https://virtman.invalid/domain/1"
"""Marks a domain as ours. It only has to be unique, and names no place."""

USER, NONE = "user", "none"


@dataclass(frozen=True)
class Machine:
    """A VM to define. ``memory`` in MiB; ``network`` is ``user``, ``none``, ``network:NAME`` or ``bridge:NAME``."""

    vm: str
    owner: str
    disk: Device
    seed: Path
    console_log: Path
    accel: str
    memory: int
    cpus: int
    network: str

    @property
    def uuid(self) -> str:
        """The same for the same VM of the same owner, always."""
        return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{NAMESPACE}/{self.owner}/{self.vm}"))

    @property
    def mac(self) -> str:
        """A locally administered unicast address (IEEE 802: second-lowest bit of the first byte) of 40 hashed bits."""
        digest = hashlib.sha256(self.uuid.encode()).digest()
        return ":".join(["02", *(f"{byte:02x}" for byte in digest[:5])])


def owner_of(xml: str) -> str | None:
    """Who defined the domain: the owner we put there, or None if it is not ours."""
    mark = ET.fromstring(xml).find(f"metadata/{{{NAMESPACE}}}virtman")  # noqa: S314  libvirt wrote it
    return None if mark is None else mark.get("owner")


def domain_xml(machine: Machine) -> str:
    """The domain's definition. Raises BadRequest for a network that is none of the kinds above."""
    root = ET.Element("domain", type="kvm" if machine.accel == "kvm" else "qemu")
    _text(root, "name", machine.vm)
    _text(root, "uuid", machine.uuid)
    metadata = ET.SubElement(root, "metadata")
    ET.SubElement(metadata, f"{{{NAMESPACE}}}virtman", owner=machine.owner)
    _text(root, "memory", str(machine.memory), unit="MiB")
    _text(root, "vcpu", str(machine.cpus))
    os = ET.SubElement(root, "os")
    _text(os, "type", "hvm", arch="x86_64", machine="q35")
    ET.SubElement(os, "boot", dev="hd")
    features = ET.SubElement(root, "features")
    ET.SubElement(features, "acpi")
    if machine.accel == "kvm":
        ET.SubElement(root, "cpu", mode="host-passthrough")
    _text(root, "on_crash", "destroy")
    devices = ET.SubElement(root, "devices")
    _disk(devices, machine.disk)
    _seed(devices, machine.seed)
    _network(devices, machine)
    _console(devices, machine.console_log)
    rng = ET.SubElement(devices, "rng", model="virtio")
    _text(rng, "backend", "/dev/urandom", model="random")
    ET.SubElement(devices, "memballoon", model="none")
    ET.register_namespace("virtman", NAMESPACE)
    return ET.tostring(root, encoding="unicode")


def _text(parent: ET.Element, tag: str, text: str, **attributes: str) -> None:
    ET.SubElement(parent, tag, attributes).text = text


def _disk(devices: ET.Element, disk: Device) -> None:
    """On an error the VM stops and awaits its administrator; it is never told (error_policy, rerror_policy)."""
    if disk.node is not None:
        element = ET.SubElement(devices, "disk", type="file", device="disk")
        _driver(element, disk.node["driver"], cache="writeback")
        _source(element, disk.node)
        if "backing" in disk.node:
            _backing(element, disk.node["backing"])
    else:
        element = ET.SubElement(devices, "disk", type="block", device="disk")
        _driver(element, "raw", cache="none")
        ET.SubElement(element, "source", dev=str(disk.path))
    ET.SubElement(element, "target", dev="vda", bus="virtio")


def _driver(disk: ET.Element, disk_format: str, cache: str) -> None:
    ET.SubElement(
        disk,
        "driver",
        name="qemu",
        type=disk_format,
        cache=cache,
        discard="unmap",
        error_policy="stop",
        rerror_policy="stop",
    )


def _source(parent: ET.Element, node: Mapping[str, Any]) -> None:
    ET.SubElement(parent, "source", file=node["file"]["filename"])


def _backing(disk: ET.Element, node: Mapping[str, Any]) -> None:
    """The host's export. Written out, since libvirt would drop the reconnect delay of the file's own header."""
    backing = ET.SubElement(disk, "backingStore", type="network")
    ET.SubElement(backing, "format", type="raw")
    source = ET.SubElement(backing, "source", protocol="nbd", name=node["export"])
    ET.SubElement(source, "host", transport="unix", socket=node["server"]["path"])
    ET.SubElement(source, "reconnect", delay=str(node["reconnect-delay"]))
    ET.SubElement(backing, "backingStore")


def _seed(devices: ET.Element, seed: Path) -> None:
    element = ET.SubElement(devices, "disk", type="file", device="disk")
    ET.SubElement(element, "driver", name="qemu", type="raw")
    ET.SubElement(element, "source", file=str(seed))
    ET.SubElement(element, "target", dev="vdb", bus="virtio")
    ET.SubElement(element, "readonly")


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


def _console(devices: ET.Element, log: Path) -> None:
    """The serial port, for ``virtman console``; everything it prints is also kept in a file."""
    serial = ET.SubElement(devices, "serial", type="pty")
    ET.SubElement(serial, "log", file=str(log), append="off")
    ET.SubElement(serial, "target", port="0")
