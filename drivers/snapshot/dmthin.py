"""A VM's private disk: a thin volume whose unwritten blocks are read from the image's device on this host.

All disks of a host share one pool (thinpool.py). (Linux: admin-guide/device-mapper/thin-provisioning, "external
snapshots".)

A snapshot of a disk is a snapshot of its volume, which costs nothing until the VM writes: then 64 KiB are copied for
the first write to each 64 KiB, whether the image or the volume had them. (The same, "Internal snapshots".)

The map is suspended while a snapshot is taken, with all requests done: whoever has the disk open waits for three runs
of dmsetup. If requests wait for a parent or for room, the snapshot is given up after 30 s. An agent that dies meanwhile
leaves the map suspended, and the next call that opens the disk resumes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from drivers.base import Device, Monitor, Place, Range
from drivers.door import door
from drivers.errors import CommandFailed, DiskInUse
from drivers.host.folders import matching
from drivers.host.space import Room
from drivers.kernel import devmapper
from drivers.kernel.devmapper import SECTOR
from drivers.names import checked
from drivers.needs import DEVICE_MAPPER, DMSETUP, LOOP, LOSETUP, MODPROBE, UDEVADM, Needs, Tool
from drivers.qemu.nodes import Nodes
from drivers.snapshot import thinmetadata
from drivers.snapshot.disks import DISK_PREFIX, MapDisks, found, is_open, resume_if_suspended
from drivers.snapshot.ranges import require_size
from drivers.snapshot.snapshotmaps import SNAPSHOT_PREFIX, SnapshotMaps
from drivers.snapshot.thinpool import COVERED, POOL, STEP, ThinPool
from drivers.snapshot.thinvolumes import Snapshot, ThinDisk, Volumes, volume_gone

log = logging.getLogger(__name__)


@door
class DmThinDisks(MapDisks[ThinDisk]):
    """Disks of VMs as ``/dev/mapper/virtman-vm-<vm>``. ``step`` and ``covered`` in bytes: see STEP and COVERED.

    The calls raise what VmDiskDriver says, and NotOurs, CommandFailed, CommandTimedOut; BadDisk also if a record is
    damaged, or the pool or a volume is lost.
    """

    needs = Needs(
        tools=(
            DMSETUP,
            LOSETUP,
            MODPROBE,
            UDEVADM,
            Tool("thin_check", "thin-provisioning-tools"),
        ),
        modules=("dm_thin_pool",),
        nodes=(DEVICE_MAPPER, LOOP),
        root=True,
    )

    def __init__(self, place: Place, *, step: int = STEP, covered: int = COVERED) -> None:
        super().__init__(place, "thin", ThinDisk)
        self._room = Room(place.state, place.reserve)
        self._volumes = Volumes(self._records, partial(devmapper.message, POOL))
        self._pool = ThinPool(self._folder, step, covered)
        self._maps = SnapshotMaps()
        self._comparing = threading.Lock()
        """Taken before ``_lock``: the kernel holds one state of the metadata at a time."""

    def resize(self, vm: str, size: int, monitor: Monitor | None) -> Device:
        """A program that has the disk open sees the size at once; QEMU, when it is told."""
        with self._lock:
            disk = self._volumes.of(vm)
            require_size(vm, disk.size, size)
            device = self._activate(vm)
            if size != disk.size:
                self._records.write(vm, replace(disk, size=size))
                device = self._activate(vm)
        if monitor is not None:
            node = Nodes(monitor).demand(devmapper.map_path(DISK_PREFIX + vm))
            monitor.execute("block_resize", {"node-name": node, "size": size})
        return device

    def take(self, vm: str, snapshot: str, monitor: Monitor | None) -> Device:  # noqa: ARG002
        """Whoever has the disk open waits for a moment. CommandTimedOut if the requests they had begun do not end."""
        checked(snapshot)
        with self._lock:
            device = self._activate(vm)
            self._volumes.take(vm, snapshot, partial(devmapper.suspended, DISK_PREFIX + vm))
            return device

    def revert(self, vm: str, snapshot: str) -> Device:
        """The map goes before the record names another volume, so that a map is always that of the record's volume."""
        checked(snapshot)
        with self._lock:
            self._volumes.kept(vm, snapshot)
            self._activate_pool()
            if is_open(vm):
                raise DiskInUse(vm)
            devmapper.remove(DISK_PREFIX + vm)
            self._volumes.revert(vm, snapshot)
            return self._activate(vm)

    def drop(self, vm: str, snapshot: str, monitor: Monitor | None) -> None:  # noqa: ARG002
        """Raises DiskInUse if somebody reads what the snapshot keeps."""
        checked(snapshot)
        with self._lock:
            snapshots = self._volumes.of(vm).snapshots
            self._activate_pool()
            if snapshot in snapshots:
                self._maps.clear(vm, snapshots[snapshot].number)
            self._volumes.drop(vm, snapshot)

    def snapshots(self, vm: str) -> frozenset[str]:
        return frozenset(self._volumes.of(vm).snapshots)

    def clone(self, vm: str, snapshot: str, new: str) -> Device:
        """The clone is over the same image."""
        for name in (vm, snapshot, new):
            checked(name)
        with self._lock:
            self._volumes.kept(vm, snapshot)
            if not self._is_made(new):
                self._clear(new)
                self._activate_pool()
                self._volumes.clone(vm, snapshot, new)
            return self._activate(new)

    @contextmanager
    def reading(self, vm: str, snapshot: str) -> Iterator[Device]:
        """The device is read-only."""
        checked(snapshot)
        with self._lock:
            disk, kept = self._volumes.of(vm), self._volumes.kept(vm, snapshot)
            self._activate_pool()
            try:
                path = self._maps.enter(kept.number, _line(kept, disk.origin))
            except CommandFailed as error:
                raise volume_gone(vm, kept, error) from error
        try:
            yield Device(size=kept.size, path=path)
        finally:
            with self._lock:
                self._maps.leave(path)

    def changes(self, vm: str, snapshot: str | None, since: str | None) -> list[Range]:
        """The blocks of 64 KiB that a snapshot, or the disk, has itself, or does not share with that of ``since``."""
        for name in (vm, *(name for name in (snapshot, since) if name is not None)):
            checked(name)
        with self._comparing, ExitStack() as stack:
            with self._lock:
                kept = self._volumes.of(vm) if snapshot is None else self._volumes.kept(vm, snapshot)
                before = None if since is None else self._volumes.kept(vm, since)
                self._activate_pool()
                if snapshot is None and is_open(vm):
                    raise DiskInUse(vm)
                stack.enter_context(thinmetadata.held(POOL))
            # Without the lock: a guest may be frozen until a snapshot of its disk is taken.
            meta = self._folder / "meta"
            if before is None:
                blocks = thinmetadata.mapped(meta, kept.number)
            else:
                blocks = thinmetadata.differing(meta, kept.number, before.number)
        return [
            block if block.offset + block.length <= kept.size else Range(block.offset, kept.size - block.offset)
            for block in blocks
            if block.offset < kept.size
        ]

    def existing(self) -> frozenset[str]:
        """VMs with a disk, whole or half made."""
        return found(matching(self._folder, "[!.]*.json"))

    def spare(self) -> int:
        """What the pool has free, and the file system to spare for more."""
        return self._pool.free() + self._room.spare(self._folder)

    def trouble(self) -> str:
        return self._pool.trouble()

    def close(self) -> None:
        """Stop watching the pool's space; disks stay usable."""
        self._pool.close()

    def _is_made(self, vm: str) -> bool:
        return self._volumes.is_made(vm)

    def _make(self, vm: str, origin: Path, origin_size: int, size: int) -> None:  # noqa: ARG002
        self._pool.require_room()
        self._clear(vm)
        self._records.write(vm, ThinDisk(0, size, str(origin), made=False))
        self._activate_pool()
        self._volumes.make(vm)

    def _activate(self, vm: str) -> Device:
        disk, name = self._volumes.of(vm), DISK_PREFIX + vm
        self._activate_pool()
        try:
            devmapper.create(name, [_line(disk, disk.origin)], group=self._group)
        except CommandFailed as error:
            raise volume_gone(vm, disk, error) from error
        resume_if_suspended(name)
        if devmapper.size(name) < disk.size:  # the disk has grown, now or before an agent was killed
            devmapper.reload(name, [_line(disk, disk.origin)])
        return Device(size=disk.size, path=devmapper.map_path(name))

    def _release(self, vm: str, new: str) -> None:  # noqa: ARG002
        self._activate_pool()
        devmapper.remove(DISK_PREFIX + vm)

    def _clear(self, vm: str) -> None:
        """Remove what there is of a disk that is not made, or whose record was lost: that one has other data."""
        self._remove(vm)
        devmapper.remove(DISK_PREFIX + vm)

    def _remove(self, vm: str) -> None:
        """With the last disk the pool goes too, unless it holds data of a disk whose record was lost."""
        if not self._records.path(vm).exists():
            return
        disk = self._records.read(vm)
        for snapshot in disk.snapshots.values():
            self._maps.clear(vm, snapshot.number)
        resume_if_suspended(DISK_PREFIX + vm)
        devmapper.remove(DISK_PREFIX + vm)
        if disk.numbers and self._pool.is_made():
            self._activate_pool()
            self._volumes.delete(disk)
        self._records.path(vm).unlink()
        if not self._records.all() and not self._is_pool_used():
            self._pool.remove()

    def _activate_pool(self) -> None:
        if self._pool.activate(self._holds_disks):
            self._maps.remove_orphans()
            thinmetadata.release(POOL)

    def _holds_disks(self) -> bool:
        return any(disk.made for disk in self._records.all().values())

    def _is_pool_used(self) -> bool:
        """Whether the pool holds data, or a map lies over it, though there is no record of a disk."""
        if not self._pool.is_made():
            return False
        self._activate_pool()
        used = self._pool.used_blocks()
        maps = sorted(devmapper.names(DISK_PREFIX) | devmapper.names(SNAPSHOT_PREFIX))
        if used or maps:
            log.warning(
                "the disks' pool is kept: there is no record of a disk, but it holds %d blocks of data, and there are "
                "the maps %s; was the state folder set back? If nobody needs them, remove %s/data and meta after a "
                "reboot",
                used,
                maps,
                self._folder,
            )
        return bool(used or maps)


def _line(volume: ThinDisk | Snapshot, origin: str) -> str:
    return f"0 {volume.size // SECTOR} thin {devmapper.map_path(POOL)} {volume.number} {origin}"
