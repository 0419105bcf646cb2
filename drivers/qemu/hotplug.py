"""Disks that a QEMU uses besides its first one. They are on a SCSI controller, and come and go while the VM runs.

A guest cannot keep a SCSI disk, since it is not asked; of a PCI device it is. On a machine that has PCI Express alone,
each later PCI device would need a port that was there from the beginning.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from drivers.base import BlockNode, Monitor
from drivers.errors import MonitorFailed
from drivers.host import retry
from drivers.qemu.monitor import disk_in_use_if_locked
from drivers.qemu.nodes import Nodes, named_after

CONTROLLER = "scsi0"
"""QEMU's ID of the controller: libvirt calls its first one so."""
SHOWN = 20
"""Characters of a serial number that a guest tells disks apart by (QEMU: hw/scsi/scsi-disk.c)."""

_CLOSE_LIMIT = 60.0
"""Seconds for QEMU to finish the guest's requests to an unplugged disk."""


def serial(name: str) -> str:
    """The disk's serial number in the guest: the name, if it is short enough."""
    return name if len(name) <= SHOWN else f"{name[: SHOWN - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def frontend(name: str) -> dict[str, Any]:
    """The guest's part of a disk, for ``-device`` and device_add. On an error the VM stops, as with its own disk."""
    return {
        "driver": "scsi-hd", "id": _device(name), "drive": node_name(name), "bus": f"{CONTROLLER}.0",
        "serial": serial(name), "device_id": serial(name), "werror": "stop", "rerror": "stop",
    }  # fmt: skip


def node_name(name: str) -> str:
    """QEMU's name of the disk's uppermost node."""
    return named_after("disk", name)


def plug(monitor: Monitor, name: str, node: BlockNode) -> None:
    """Give the disk to a running VM, unless the VM has it. Raises DiskInUse, MonitorFailed."""
    if _is_plugged(monitor, name):
        return
    _close(monitor, node)  # an agent that was killed may have left it open
    with disk_in_use_if_locked(name):
        monitor.execute("blockdev-add", {**node, "node-name": node_name(name)})
    try:
        monitor.execute("device_add", frontend(name))
    except MonitorFailed:
        _close(monitor, node)
        raise


def unplug(monitor: Monitor, name: str, node: BlockNode) -> None:
    """Take the disk from a running VM, if the VM has it. Raises MonitorFailed."""
    if _is_plugged(monitor, name):
        monitor.execute("device_del", {"id": _device(name)})
    _close(monitor, node)


def _is_plugged(monitor: Monitor, name: str) -> bool:
    devices = monitor.execute("qom-list", {"path": "/machine/peripheral"})
    return any(device["name"] == _device(name) for device in devices)


def _close(monitor: Monitor, node: BlockNode) -> None:
    """Close the files of the node. QEMU closes those that it opened for another node together with that node."""
    nodes = Nodes(monitor)
    for file in _files(node):
        if (opened := nodes.of(file)) is not None:
            _delete(monitor, opened)
            nodes.refresh()


def _delete(monitor: Monitor, node: str) -> None:
    """Close a node. QEMU releases the node of an unplugged device some time after the guest has lost the device."""

    def is_deleted() -> bool:
        try:
            monitor.execute("blockdev-del", {"node-name": node})
        except MonitorFailed as error:
            if "in use" not in error.why:
                raise
            return False
        return True

    if not retry.until(is_deleted, limit=_CLOSE_LIMIT):
        raise MonitorFailed("blockdev-del", f"node {node} is still in use after {_CLOSE_LIMIT:g} s")


def _files(node: BlockNode | None) -> list[Path]:
    """The files of the layers, the highest first; what is below them is closed with the last one."""
    if node is None or node.get("file", {}).get("driver") != "file":
        return []
    return [Path(node["file"]["filename"]), *_files(node.get("backing"))]


def _device(name: str) -> str:
    return f"virtman-with-{name}"
