"""Boots a VM from a local file with the definition of a VM that VirtMan booted: what VirtMan is compared with.

The two differ in the disk's base only: a qcow2 overlay on a local raw file here, on the host's export there.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import libvirt

from lab.errors import LabError
from lab.login import wait_login
from lab.tools import run
from virtman.client import AgentClient

QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}"


class LocalVm:
    """A VM to boot from a file. Its definition is taken from ``host``, which boots it once for a moment."""

    def __init__(self, uri: str, name: str, host: AgentClient, image: str, folder: Path, **how: Any) -> None:
        """``image`` is one that the host has; ``how`` as for AgentClient.boot."""
        folder.mkdir(parents=True, exist_ok=True)
        self.console_log = folder / f"{name}.console"
        self._uri, self._name = uri, name
        self._overlay, self._seed = folder / f"{name}.qcow2", folder / f"{name}.seed.iso"
        vm = host.boot(name, image, **how)
        try:
            self._definition = self._take_definition()
            self._layout = layout_of(Path(vm.disk.path))
        finally:
            host.destroy(name)

    def _take_definition(self) -> ET.Element:
        connection = libvirt.open(self._uri)
        try:
            root = ET.fromstring(connection.lookupByName(self._name).XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
        finally:
            connection.close()
        seed = next(node for node in block_nodes(root) if "seed" in node["node-name"])
        shutil.copy(seed["file"]["filename"], self._seed)
        return root

    def boot(self, file: Path, timeout: float) -> float:
        """Boot on a new overlay over the raw ``file``. Returns the seconds to the login prompt; the VM is off again."""
        self.console_log.unlink(missing_ok=True)
        self._overlay.unlink(missing_ok=True)
        connection = libvirt.open(self._uri)
        try:
            started = time.monotonic()
            create = ["qemu-img", "create", "-q", "-f", "qcow2", "-o", self._layout, "-F", "raw", "-b"]
            run([*create, str(file), str(self._overlay)])
            domain = connection.createXML(
                local_definition(self._definition, file, self._overlay, self._seed, self.console_log)
            )
            try:
                return wait_login(self._name, self.console_log, timeout) - started
            finally:
                domain.destroy()
        finally:
            connection.close()


def layout_of(disk: Path) -> str:
    """The options to create a qcow2 file with the layout of ``disk``."""
    info = json.loads(run(["qemu-img", "info", "--force-share", "--output=json", disk]))
    extended = "on" if info["format-specific"]["data"].get("extended-l2") else "off"
    return f"cluster_size={info['cluster-size']},extended_l2={extended}"


def block_nodes(root: ET.Element) -> list[dict[str, Any]]:
    """The ``--blockdev`` options of a definition that hands its disks to QEMU as block nodes."""
    return [json.loads(argument.attrib["value"]) for argument in _block_arguments(root)]


def _block_arguments(root: ET.Element) -> list[ET.Element]:
    arguments = root.findall(f"{QEMU}commandline/{QEMU}arg")
    return [value for name, value in itertools.pairwise(arguments) if name.attrib["value"] == "-blockdev"]


def local_definition(root: ET.Element, file: Path, overlay: Path, seed: Path, console_log: Path) -> str:
    """The definition with the disk on ``overlay`` over ``file``. Raises LabError if it has no such disk and seed."""
    changed = ET.fromstring(ET.tostring(root))
    found = []
    for argument in _block_arguments(changed):
        node = json.loads(argument.attrib["value"])
        kind = "seed" if "seed" in node["node-name"] else "disk"
        found.append(kind)
        if kind == "seed":
            node["file"]["filename"] = str(seed)
        else:
            node["file"]["filename"] = str(overlay)
            node["backing"] = {"driver": "raw", "file": {"driver": "file", "filename": str(file)}}
        argument.set("value", json.dumps(node))
    if sorted(found) != ["disk", "seed"]:
        raise LabError(f"a VM's definition has not one disk and one seed, but: {found}")
    for log in changed.iterfind("devices//log"):
        log.set("file", str(console_log))
    return ET.tostring(changed, encoding="unicode")
