"""A VM's private disk: a thin volume whose unwritten blocks are read from the image's device on this host.

All disks of a host share one pool in two files of ``<state>/thin``. The data file takes its disk space before the pool
is told of it, so that a write to a VM's disk never meets a full file system; it grows by ``step`` bytes whenever less
than half a step is left. When the file system is full, the kernel holds the VMs' writes until there is room, but for no
longer than its parameter ``no_space_timeout`` says: 60 s as it comes. That one is of all pools of the machine, so it is
not changed here. A pool that is given its table anew begins to wait anew: it is, for as long as there is no room.
(Linux: admin-guide/device-mapper/thin-provisioning, "external snapshots" and "low water mark"; drivers/md/dm-thin.c,
set_pool_mode and bind_control_target.)

A point in time of a disk is a snapshot of its volume, which costs nothing until the VM writes: then 64 KiB are copied
for the first write to each 64 KiB, whether the image or the volume had them. (The same, "Internal snapshots".)

The map is suspended while a snapshot is taken, with all requests done: whoever has the disk open waits for three runs
of dmsetup. If requests wait for a parent or for room, the snapshot is given up after 30 s. An agent that dies meanwhile
leaves the map suspended, and the next call that opens the disk resumes it. Snapshots use more metadata than data, so
the pool also grows when metadata alone run low.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from drivers.base import Device, Monitor, Place, Range
from drivers.door import door
from drivers.errors import BadDisk, CommandFailed, DiskInUse, DriverError, NoSpace, NotOurs
from drivers.host.command import run
from drivers.host.folders import matching
from drivers.host.space import Room, allocate, shortage
from drivers.host.watch import Watch
from drivers.kernel import devmapper, loopdev
from drivers.kernel.alarm import Alarm
from drivers.kernel.devmapper import SECTOR
from drivers.names import checked
from drivers.needs import DEVICE_MAPPER, DMSETUP, LOOP, LOSETUP, MODPROBE, UDEVADM, Needs, Tool
from drivers.qemu.nodes import Nodes
from drivers.snapshot import thinmetadata
from drivers.snapshot.disks import DISK_PREFIX, MapDisks, checked_growth, found, is_open, wake
from drivers.snapshot.snapshotmaps import SNAPSHOT_PREFIX, SnapshotMaps
from drivers.snapshot.thinvolumes import Snapshot, ThinDisk, Volumes, is_lost, is_new, volume_gone

log = logging.getLogger(__name__)

POOL = "virtman-pool"
STEP = 1 << 30
"""Bytes by which the pool grows."""

BLOCK_SECTORS = 128
"""What a first write copies from the image: 64 KiB, the smallest block that the kernel allows."""

META_BYTES, COVERED = 64 << 20, 64 << 30
"""Bytes of metadata, and of the data that they describe: 64 bytes a block, where the kernel's document counts 48. The
metadata grow before the data, since the kernel holds writes that find no room for data, but fails those that find none
in the metadata (Linux: drivers/md/dm-thin.c, PM_OUT_OF_DATA_SPACE and PM_OUT_OF_METADATA_SPACE)."""

_META_BLOCK = 4096

_FEATURES = "1 no_discard_passdown"
"""The end of a pool's table. What a VM discards is the pool's again, and not the file system's: a hole that the
loop device made in the data file would be a write that fails when the file system is full."""

_CHECK_LIMIT = 600.0
"""Seconds: it reads all metadata, and a large pool on a slow disk has gigabytes of them."""

_RETRY = 5.0
"""Seconds until room is looked for again, at most."""

_IN_WANT = "out_of_data_space"
_TAKES_NO_WRITES = {"ro", "Fail", "needs_check"}
"""Words in the status of a pool (Linux: admin-guide/device-mapper/thin-provisioning)."""
_NO_SPACE_TIMEOUT = Path("/sys/module/dm_thin_pool/parameters/no_space_timeout")


@door
class DmThinDisks(MapDisks[ThinDisk]):
    """Disks of VMs as ``/dev/mapper/virtman-vm-<vm>``. ``step`` and ``covered`` in bytes: see STEP and COVERED."""

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
        self._volumes = Volumes(self._records, lambda text: devmapper.message(POOL, text))
        self._snapshot_maps = SnapshotMaps()
        self._comparing = threading.Lock()
        """Taken before ``_lock``: of what the kernel keeps of the metadata there is one at a time."""
        self._step, self._covered = step, covered
        self._watch: _PoolWatch | None = None

    def resize(self, vm: str, size: int, monitor: Monitor | None) -> Device:
        """Let the disk have ``size`` bytes. A program that has it open sees that at once; QEMU, when it is told.

        Raises VmDiskMissing, BadDisk, BadName, NotOurs, CommandFailed, MonitorFailed.
        """
        with self._lock:
            disk = self._volumes.of(vm)
            checked_growth(vm, disk.size, size)
            device = self._activate(vm)
            if size != disk.size:
                self._records.write(vm, replace(disk, size=size))
                device = self._activate(vm)
        if monitor is not None:
            node = Nodes(monitor).demand(devmapper.map_path(DISK_PREFIX + vm))
            monitor.execute("block_resize", {"node-name": node, "size": size})
        return device

    def take(self, vm: str, snapshot: str, monitor: Monitor | None) -> Device:  # noqa: ARG002
        """Keep what the disk holds, whoever has it open: their requests wait for a moment.

        Raises VmDiskMissing, BadDisk, BadName, NotOurs, CommandFailed, CommandTimedOut if requests that they had
        begun do not end.
        """
        checked(snapshot)
        with self._lock:
            device = self._activate(vm)
            self._volumes.take(vm, snapshot, partial(devmapper.suspended, DISK_PREFIX + vm))
            return device

    def revert(self, vm: str, snapshot: str) -> Device:
        """Let the disk hold what the snapshot keeps.

        The map goes before the record names another volume, so that a map is always that of the record's volume.
        Raises VmDiskMissing, SnapshotMissing, DiskInUse, BadDisk, BadName, NotOurs, CommandFailed.
        """
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
        """Delete a snapshot.

        Raises VmDiskMissing, DiskInUse if somebody reads what it keeps, BadDisk, BadName, NotOurs, CommandFailed.
        """
        checked(snapshot)
        with self._lock:
            snapshots = self._volumes.snapshots(vm)
            self._activate_pool()
            if snapshot in snapshots:
                self._snapshot_maps.clear(vm, snapshots[snapshot].number)
            self._volumes.drop(vm, snapshot)

    def snapshots(self, vm: str) -> frozenset[str]:
        """The snapshots that are whole. Raises VmDiskMissing, BadDisk, BadName."""
        return frozenset(self._volumes.snapshots(vm))

    def clone(self, vm: str, snapshot: str, new: str) -> Device:
        """A disk of another VM over the same image, and as large as the snapshot.

        Raises VmDiskMissing, SnapshotMissing, BadDisk, BadName, NotOurs, CommandFailed.
        """
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
        """A read-only device with what a snapshot keeps, for as long as it is read.

        Raises VmDiskMissing, SnapshotMissing, BadDisk, BadName, NotOurs, CommandFailed.
        """
        checked(snapshot)
        with self._lock:
            disk, kept = self._volumes.of(vm), self._volumes.kept(vm, snapshot)
            self._activate_pool()
            try:
                path = self._snapshot_maps.enter(kept.number, _line(kept, disk.origin))
            except CommandFailed as error:
                raise volume_gone(vm, kept, error) from error
        try:
            yield Device(size=kept.size, path=path)
        finally:
            with self._lock:
                self._snapshot_maps.leave(kept.number)

    def changes(self, vm: str, snapshot: str | None, since: str | None) -> list[Range]:
        """The blocks of 64 KiB that a snapshot, or the disk, has itself, or does not share with that of ``since``.

        Raises VmDiskMissing, SnapshotMissing, DiskInUse, BadDisk, BadName, NotOurs, CommandFailed, CommandTimedOut.
        """
        for name in (vm, *(name for name in (snapshot, since) if name is not None)):
            checked(name)
        with self._comparing, ExitStack() as stack:
            with self._lock:
                kept = self._volumes.of(vm) if snapshot is None else self._volumes.kept(vm, snapshot)
                before = None if since is None else self._volumes.kept(vm, since)
                self._activate_pool()
                if snapshot is None and is_open(vm):
                    raise DiskInUse(vm)
                stack.enter_context(thinmetadata.kept(POOL))
            # Nobody waits for this but who compares, too: a guest may be held still until a snapshot of it is taken.
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
        """What the pool has free, and the file system to spare for more. Raises BadDisk, NotOurs, CommandFailed."""
        free = _Fill.of(devmapper.status(POOL)).free if devmapper.exists(POOL) else 0
        return free + self._room.spare(self._folder)

    def trouble(self) -> str:
        """Whether there is room for the pool's next step, and the pool is ours, over our files, and takes writes."""
        try:
            if not devmapper.exists(POOL):
                return ""
            self._check_files()
            if any(word in _TAKES_NO_WRITES for word in devmapper.status(POOL).split()):
                return f"the disks' pool takes no writes any more, see the kernel's log: {devmapper.status(POOL)}"
            said = shortage(self._folder, self._step)
        except (NotOurs, BadDisk) as error:
            return str(error)
        limit = _no_space_timeout() if said else 0.0
        return f"{said}, and if no agent runs their writes fail after {limit:g} s" if limit else said

    def close(self) -> None:
        """Stop watching the pool's space; disks stay usable."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _is_made(self, vm: str) -> bool:
        return self._volumes.is_made(vm)

    def _make(self, vm: str, origin: Path, origin_size: int, size: int) -> None:  # noqa: ARG002
        self._make_room()
        self._clear(vm)
        self._records.write(vm, ThinDisk(0, size, str(origin), made=False))
        self._activate_pool()
        self._volumes.make(vm)

    def _activate(self, vm: str) -> Device:
        disk, name = self._volumes.of(vm), DISK_PREFIX + vm
        self._activate_pool()
        if not devmapper.exists(name):
            _map(vm, disk, self._group)
        wake(name)
        if devmapper.size(name) < disk.size:  # it was just made larger, or an agent ended while it made it so
            devmapper.reload(name, [_line(disk, disk.origin)])
        return Device(size=disk.size, path=devmapper.map_path(name))

    def _let_go(self, vm: str, new: str) -> None:  # noqa: ARG002
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
            self._snapshot_maps.clear(vm, snapshot.number)
        wake(DISK_PREFIX + vm)
        devmapper.remove(DISK_PREFIX + vm)
        if disk.numbers and self._has_pool():
            self._activate_pool()
            self._volumes.delete(disk)
        self._records.path(vm).unlink()
        if not self._records.all() and not self._is_used():
            self._remove_pool()

    # The pool

    def _activate_pool(self) -> None:
        if not devmapper.exists(POOL):
            meta, data = self._folder / "meta", self._folder / "data"
            if is_lost(self._folder) and any(disk.made for disk in self._records.all().values()):
                raise BadDisk(f"the disks' pool is lost, and with it the data of all disks: {meta}, {data}")
            allocate(meta, META_BYTES)
            allocate(data, self._step)
            _check(meta)
            devmapper.create(POOL, [self._pool_line()])
        if self._watch is None:
            self._check_files()
            self._snapshot_maps.sweep()
            thinmetadata.release(POOL)
            self._watch = _PoolWatch(self._grow_if_low)

    def _check_files(self) -> None:
        """Raises BadDisk if the pool runs over other files than the folder has now: those are lost with a reboot."""
        files = [self._folder / name for name in ("meta", "data")]
        numbers = devmapper.numbers_in(devmapper.table(POOL))
        if not all(loopdev.is_over(number, file) for number, file in zip(numbers, files, strict=True)):
            raise BadDisk(
                f"the disks' pool runs over other files than {files[0]} and {files[1]}: this folder was moved or set"
                " back while VMs' disks were open; bring it back as it was, or stop the VMs and reboot"
            )

    def _pool_line(self) -> str:
        meta, data = self._folder / "meta", self._folder / "data"
        sectors = data.stat().st_size // SECTOR // BLOCK_SECTORS * BLOCK_SECTORS
        low = self._step // 2 // SECTOR // BLOCK_SECTORS
        devices = f"{loopdev.attach(meta)} {loopdev.attach(data)}"
        return f"0 {sectors} thin-pool {devices} {BLOCK_SECTORS} {low} {_FEATURES}"

    def _has_pool(self) -> bool:
        return devmapper.exists(POOL) or not is_lost(self._folder)

    def _is_used(self) -> bool:
        """Whether the pool holds data, or a map lies over it, though no disk is written down."""
        if not self._has_pool():
            return False
        self._activate_pool()
        used = _Fill.of(devmapper.status(POOL)).used
        maps = sorted(devmapper.names(DISK_PREFIX) | devmapper.names(SNAPSHOT_PREFIX))
        if used or maps:
            log.warning(
                "the disks' pool is kept: no disk is written down, but it holds %d blocks of data, and there are the "
                "maps %s; was the state folder set back? If nobody needs them, remove %s/data and meta after a reboot",
                used,
                maps,
                self._folder,
            )
        return bool(used or maps)

    def _remove_pool(self) -> None:
        self.close()
        if POOL in devmapper.names(POOL):
            devmapper.remove(POOL)
        for name in ("data", "meta"):
            loopdev.detach(self._folder / name)
            (self._folder / name).unlink(missing_ok=True)

    def _make_room(self) -> None:
        """Raises NotOurs, NoSpace, before anything is made."""
        devmapper.exists(POOL)
        free = os.statvfs(self._folder).f_bavail * os.statvfs(self._folder).f_frsize
        needed = 0 if (self._folder / "data").exists() else META_BYTES + self._step
        if free < needed:
            raise NoSpace(self._folder, free, needed)

    def _grow_if_low(self) -> bool:
        """Give the pool another step of space if it is running low. False if the file system has no room for it.

        Metadata also run low by snapshots: what is written after one was taken has its place written down once more,
        and 4 KiB of them are copied for as little as one block.
        """
        pool = _Fill.of(devmapper.status(POOL))
        low, meta_low = pool.free <= self._step // 2, pool.meta_free <= META_BYTES // 4
        if not low and not meta_low:
            return True
        meta, data = self._folder / "meta", self._folder / "data"
        size = pool.size + self._step * low  # the file may have grown before, and not the pool
        try:
            allocate(meta, max(META_BYTES * -(-size // self._covered), pool.meta_size + META_BYTES * meta_low))
            allocate(data, size)
        except NoSpace as error:
            log.warning("the disks' pool cannot grow, and VMs that write are held when it is full: %s", error)
            return False
        for file in (meta, data):
            run(["losetup", "--set-capacity", str(loopdev.attach(file))])
        devmapper.reload(POOL, [self._pool_line()])
        log.info("the disks' pool has %d bytes now", data.stat().st_size)
        return True


def _map(vm: str, disk: ThinDisk, group: int | None) -> None:
    """Raises BadDisk if the pool does not have the volume."""
    try:
        devmapper.create(DISK_PREFIX + vm, [_line(disk, disk.origin)], group=group)
    except CommandFailed as error:
        raise volume_gone(vm, disk, error) from error


def _line(volume: ThinDisk | Snapshot, origin: str) -> str:
    return f"0 {volume.size // SECTOR} thin {devmapper.map_path(POOL)} {volume.number} {origin}"


class _PoolWatch:
    """Has the pool grow, at once and after each event of the pool, in a thread of its own."""

    def __init__(self, grow_if_low: Callable[[], bool]) -> None:
        self._grow_if_low = grow_if_low
        self._stopped = threading.Event()
        self._alarm = Alarm()
        self._thread = Watch("pool-watch", self._run, self._stopped)
        self._thread.start()

    def close(self) -> None:
        """Stop; the pool stays."""
        self._stopped.set()
        self._alarm.ring()
        self._thread.join()
        self._alarm.close()

    def _run(self) -> None:
        waits_since = -math.inf  # it may have been without room, and without an agent, for long
        while not self._stopped.is_set():
            self._alarm.arm()
            seen = devmapper.events(POOL)
            if self._enough():
                self._wait_for_event(seen)
                continue
            limit = _no_space_timeout()
            if limit and time.monotonic() - waits_since > limit / 3:
                _wait_anew()
                waits_since = time.monotonic()
            self._stopped.wait(min(_RETRY, limit / 4) if limit else _RETRY)

    def _enough(self) -> bool:
        try:
            return self._grow_if_low()
        except (DriverError, OSError) as error:
            log.error("the disks' pool is low on space and could not be grown: %s", error)
            return False

    def _wait_for_event(self, seen: int) -> None:
        """Until the pool has had another event, or this is closed."""
        while not self._stopped.is_set() and devmapper.events(POOL) == seen:
            self._alarm.wait()
            self._alarm.arm()


def _check(meta: Path) -> None:
    """Look through metadata before they are used, as lvm2 does. Raises BadDisk if they are damaged.

    The kernel does not: after an error it marks them, and lets nobody write until somebody has looked (thin_check(8)).
    """
    if is_new(meta):
        return
    log.info("checking the metadata of the disks' pool: %s", meta)
    try:
        run(["thin_check", "-q", "--clear-needs-check-flag", str(meta)], timeout=_CHECK_LIMIT)
    except CommandFailed as error:
        raise BadDisk(f"the metadata of the disks' pool are damaged, see thin_repair(8): {meta}: {error}") from error


def _no_space_timeout() -> float:
    """Seconds that the kernel holds writes to a pool without room; 0: for ever. Raises OSError."""
    return float(_NO_SPACE_TIMEOUT.read_text())


def _wait_anew() -> None:
    """Have a pool without room hold writes from now on, also if it has begun to fail them. Raises DriverError."""
    if _IN_WANT in devmapper.status(POOL).split():
        devmapper.reload(POOL, devmapper.table(POOL).splitlines())


@dataclass(frozen=True)
class _Fill:
    """How full a pool is: blocks of data in use, and else bytes."""

    used: int
    size: int
    free: int
    meta_size: int
    meta_free: int

    @classmethod
    def of(cls, status: str) -> _Fill:
        """By a pool's status line. Raises BadDisk if it has failed."""
        words = status.split()
        if len(words) < 6:
            raise BadDisk(f"the disks' pool has failed: {status}")
        (meta_used, meta), (used, data) = (map(int, word.split("/")) for word in words[4:6])
        block = BLOCK_SECTORS * SECTOR
        return cls(used, data * block, (data - used) * block, meta * _META_BLOCK, (meta - meta_used) * _META_BLOCK)
