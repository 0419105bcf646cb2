"""Disks that a QEMU uses besides its first one, on a SCSI controller: they come and go while the VM runs.

A guest is not asked whether a SCSI disk may go, as it is for a PCI device, and so no guest can keep it. On a machine of
PCI Express alone, each PCI device to come would need a port of its own from the beginning.
"""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

from drivers.base import BlockNode, Monitor
from drivers.errors import DiskInUse, MonitorFailed
from drivers.qemu.monitor import is_locked
from drivers.qemu.nodes import Nodes, named_after

CONTROLLER = "scsi0"
"""QEMU's ID of the controller: libvirt calls its first one so."""
SHOWN = 20
"""Characters of a serial number that a guest tells disks apart by (QEMU: hw/scsi/scsi-disk.c)."""

_GOING = 60.0
"""Seconds that a disk has to go: QEMU waits for what the guest has asked of it."""
_SHORTEST, _LONGEST = 0.01, 0.5


def serial(name: str) -> str:
    """What the guest knows the disk by: the name, if it is short enough."""
    return name if len(name) <= SHOWN else f"{name[: SHOWN - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def frontend(name: str) -> dict[str, Any]:
    """The guest's part of a disk, for ``-device`` and device_add. On an error the VM stops, as with its own disk."""
    return {
        "driver": "scsi-hd", "id": _device(name), "drive": node_name(name), "bus": f"{CONTROLLER}.0",
        "serial": serial(name), "device_id": serial(name), "werror": "stop", "rerror": "stop",
    }  # fmt: skip


def node_name(name: str) -> str:
    """QEMU's name of the node that the disk begins with."""
    return named_after("disk", name)


def plug(monitor: Monitor, name: str, node: BlockNode) -> None:
    """Let a running VM have the disk; one that it has is left alone. Raises DiskInUse, MonitorFailed."""
    if _is_plugged(monitor, name):
        return
    _close(monitor, node)  # of a call that was cut off
    try:
        monitor.execute("blockdev-add", {**node, "node-name": node_name(name)})
    except MonitorFailed as error:
        if is_locked(error.why):
            raise DiskInUse(name) from error
        raise
    try:
        monitor.execute("device_add", frontend(name))
    except MonitorFailed:
        _close(monitor, node)
        raise


def unplug(monitor: Monitor, name: str, node: BlockNode) -> None:
    """Take the disk away from a running VM; one that it does not have is fine. Raises MonitorFailed."""
    if _is_plugged(monitor, name):
        monitor.execute("device_del", {"id": _device(name)})
    _close(monitor, node)


def _is_plugged(monitor: Monitor, name: str) -> bool:
    devices = monitor.execute("qom-list", {"path": "/machine/peripheral"})
    return any(device["name"] == _device(name) for device in devices)


def _close(monitor: Monitor, node: BlockNode) -> None:
    """Close the files of the node. Those that were opened with one above them go with that one."""
    nodes = Nodes(monitor)
    for file in _files(node):
        if (opened := nodes.of(file)) is not None:
            _delete(monitor, opened)
            nodes.look()


def _delete(monitor: Monitor, node: str) -> None:
    """A device that is gone for the guest lets go of its node a little later."""
    pause, end = _SHORTEST, time.monotonic() + _GOING
    while True:
        try:
            monitor.execute("blockdev-del", {"node-name": node})
        except MonitorFailed as error:
            if "in use" not in error.why or time.monotonic() > end:
                raise
        else:
            return
        threading.Event().wait(pause)
        pause = min(2 * pause, _LONGEST)


def _files(node: BlockNode | None) -> list[Path]:
    """The files of the layers, the highest first; what is below them is closed with the last one."""
    if node is None or node.get("file", {}).get("driver") != "file":
        return []
    return [Path(node["file"]["filename"]), *_files(node.get("backing"))]


def _device(name: str) -> str:
    return f"virtman-with-{name}"
