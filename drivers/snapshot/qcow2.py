"""A VM's private disk: a qcow2 file on top of the image that this host serves.

The file's header names its backing, so that any QEMU opens the disk by its path alone and holds its requests while the
storage daemon restarts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from drivers.base import Device, Existing, Place
from drivers.door import door
from drivers.errors import BadDevice, BadDisk, DriverError, NoSpace, SnapshotMissing
from drivers.host.command import run
from drivers.host.durable import sync
from drivers.host.space import shortage
from drivers.names import checked
from drivers.needs import QEMU_IMG, Needs
from drivers.qemu.qcow2file import read_header

_BACKING_PREFIX = "json:"
_SECTOR = 512
_ROOM = 1 << 20
"""Bytes that must be free for an empty disk: it takes 0.3 MB."""

LOW = 1 << 30
"""Bytes: with less free, people are told."""

_LAYOUT = "cluster_size=128k,extended_l2=on"
"""Subclusters of 4 KiB: a small first write copies 4 KiB from the image, not a cluster fetched from the parents."""


@door
class Qcow2Snapshot:
    """Disks of VMs in ``<state>/snapshots``."""

    needs = Needs(tools=(QEMU_IMG,))

    def __init__(self, place: Place) -> None:
        self._folder = place.state / "snapshots"
        self._folder.mkdir(parents=True, exist_ok=True)

    def create(self, vm: str, origin: Device, size: int) -> Device:
        """A disk of ``size`` bytes over ``origin``, which this host's export made (``NbdExport.local``).

        Raises BadDisk if the size is below the image's or no multiple of 512; BadDevice, BadName, NoSpace,
        CommandFailed.
        """
        path = self._path(vm)
        if path.exists():
            return self.open(vm)
        if origin.node is None:
            raise BadDevice(f"VM {vm}: the origin has no QEMU block node")
        if size < origin.size or size % _SECTOR:
            raise BadDisk(f"VM {vm}: {size} is not a disk size: a multiple of {_SECTOR}, and at least {origin.size}")
        self._require_room()
        fresh = self._fresh(vm)
        backing = _BACKING_PREFIX + json.dumps({"driver": "raw", "file": origin.node})
        layout = ["-u", "-f", "qcow2", "-o", _LAYOUT, "-F", "raw", "-b", backing]
        try:
            run(["qemu-img", "create", "-q", *layout, str(fresh), str(size)])
            sync(fresh)  # who is told of the disk finds it after a power cut
        except (DriverError, OSError):
            fresh.unlink(missing_ok=True)
            self._require_room()
            raise
        fresh.rename(path)
        sync(self._folder)
        return self.open(vm)

    def open(self, vm: str) -> Device:
        """The VM's disk as its file describes it. Raises SnapshotMissing, BadDisk, BadName."""
        path = self._path(vm)
        try:
            header = read_header(path)
        except FileNotFoundError:
            raise SnapshotMissing(vm) from None
        try:
            backing = json.loads((header.backing or "").removeprefix(_BACKING_PREFIX))
        except ValueError:
            raise BadDisk(f"{path} is not a disk that was made here: its backing is {header.backing!r}") from None
        file = {"driver": "file", "filename": str(path)}
        return Device(size=header.size, path=path, node={"driver": "qcow2", "file": file, "backing": backing})

    def delete(self, vm: str) -> None:
        """Remove the VM's disk, whole or half made."""
        self._path(vm).unlink(missing_ok=True)
        self._fresh(vm).unlink(missing_ok=True)

    def existing(self) -> Existing:
        """VMs with a disk, whole or half made."""
        details = {path.stem: "half made" for path in self._folder.glob("*.new")}
        details |= {path.stem: str(path) for path in self._folder.glob("*.qcow2")}
        return Existing(frozenset(details), details)

    def trouble(self) -> str:
        """Whether the file system is running full under the disks."""
        return shortage(self._folder, LOW) if self.existing().names else ""

    def _path(self, vm: str) -> Path:
        return self._folder / f"{checked(vm)}.qcow2"

    def _fresh(self, vm: str) -> Path:
        return self._folder / f"{checked(vm)}.new"

    def _require_room(self) -> None:
        free = shutil.disk_usage(self._folder).free
        if free < _ROOM:
            raise NoSpace(self._folder, free, _ROOM)
