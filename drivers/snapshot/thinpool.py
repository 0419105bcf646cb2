"""The pool of all thin volumes of a host, in two files of ``<state>/thin``, and how it grows.

The data file takes its disk space before the pool is told of it, so that a write to a VM's disk never meets a full file
system. It grows by a step whenever less than half a step is left. When the file system is full, the kernel holds the
VMs' writes until there is room, but for no longer than its parameter ``no_space_timeout`` says: 60 s by default. The
parameter is of all pools of the machine, so it is not changed here. A pool that is given its table anew begins to wait
anew: that is done for as long as there is no room.
(Linux: admin-guide/device-mapper/thin-provisioning, "low water mark"; drivers/md/dm-thin.c, set_pool_mode and
bind_control_target.)

Snapshots use more metadata than data, so the pool also grows when metadata alone run low.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from drivers.errors import BadDisk, CommandFailed, DriverError, NoSpace, NotOurs
from drivers.host.command import run
from drivers.host.space import allocate, shortage
from drivers.host.watch import Watch
from drivers.kernel import devmapper, dmioctl, loopdev
from drivers.kernel.alarm import Alarm
from drivers.kernel.devmapper import SECTOR

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
_SUPERBLOCK = 4096
"""Bytes of the first block of metadata: the kernel takes zeros there for new metadata."""

_FEATURES = "1 no_discard_passdown"
"""The end of a pool's table. What a VM discards is the pool's again, and not the file system's: a hole that the
loop device made in the data file would be a write that fails when the file system is full."""

_CHECK_LIMIT = 600.0
"""Seconds: thin_check reads all metadata, and a large pool on a slow disk has gigabytes of them."""

_RETRY = 5.0
"""Seconds between two attempts to find room, at most."""

_OUT_OF_SPACE = "out_of_data_space"
_TAKES_NO_WRITES = {"ro", "Fail", "needs_check"}
"""Words in the status of a pool (Linux: admin-guide/device-mapper/thin-provisioning)."""
_NO_SPACE_TIMEOUT = Path("/sys/module/dm_thin_pool/parameters/no_space_timeout")


class ThinPool:
    """``step``, ``covered`` in bytes: see STEP and COVERED. Calls come one at a time, and raise NotOurs, BadDisk,
    CommandFailed, CommandTimedOut, OSError.
    """

    def __init__(self, folder: Path, step: int, covered: int) -> None:
        self._folder, self._step, self._covered = folder, step, covered
        self._meta, self._data = folder / "meta", folder / "data"
        self._watch: _PoolWatch | None = None

    def is_lost(self) -> bool:
        """Whether files of a pool that was used are missing or blank."""
        return is_new(self._meta) or not self._data.exists() or not self._data.stat().st_size

    def is_made(self) -> bool:
        """Whether there is a pool, or were one if the host was down."""
        return devmapper.exists(POOL) or not self.is_lost()

    def activate(self, holds_disks: Callable[[], bool]) -> bool:
        """Have the kernel run the pool, and watch its space. Returns whether this process had not done so yet.

        ``holds_disks``: whether records name volumes of the pool; then a lost pool is not made anew. Raises NoSpace.
        """
        if not devmapper.exists(POOL):
            if self.is_lost() and holds_disks():
                raise BadDisk(f"the disks' pool is lost, and with it the data of all disks: {self._meta}, {self._data}")
            allocate(self._meta, META_BYTES)
            allocate(self._data, self._step)
            _check(self._meta)
            devmapper.create(POOL, [self._table()])
        if self._watch is not None:
            return False
        self._require_own_files()
        self._watch = _PoolWatch(self)
        return True

    def close(self) -> None:
        """Stop watching the space; the pool stays."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def remove(self) -> None:
        self.close()
        devmapper.remove(POOL)
        for file in (self._data, self._meta):
            loopdev.detach(file)
            file.unlink(missing_ok=True)

    def require_room(self) -> None:
        """Raise NoSpace before anything is made for a first disk."""
        devmapper.exists(POOL)
        free = os.statvfs(self._folder).f_bavail * os.statvfs(self._folder).f_frsize
        needed = 0 if self._data.exists() else META_BYTES + self._step
        if free < needed:
            raise NoSpace(self._folder, free, needed)

    def free(self) -> int:
        """Bytes for data that no volume uses."""
        return _Fill.now().free if devmapper.exists(POOL) else 0

    def used_blocks(self) -> int:
        return _Fill.now().used

    def trouble(self) -> str:
        """What keeps VMs from writing, or will when the pool needs its next step; empty if nothing does."""
        try:
            if not devmapper.exists(POOL):
                return ""
            self._require_own_files()
            status = dmioctl.status(POOL)
            if not _TAKES_NO_WRITES.isdisjoint(status.split()):
                return f"the disks' pool takes no writes any more, see the kernel's log: {status}"
            said = shortage(self._folder, self._step)
        except (NotOurs, BadDisk) as error:
            return str(error)
        limit = _no_space_timeout() if said else 0.0
        return f"{said}, and if no agent runs their writes fail after {limit:g} s" if limit else said

    def grow_if_low(self) -> bool:
        """Give the pool another step of space if it is running low. False if the file system has no room for it.

        The volume of a disk with a snapshot needs metadata for each block that is written anew, and 4 KiB of metadata
        may be copied for as little as one block.
        """
        pool = _Fill.now()
        low, meta_low = pool.free <= self._step // 2, pool.meta_free <= META_BYTES // 4
        if not low and not meta_low:
            return True
        size = pool.size + self._step * low  # the file may have grown before, and not the pool
        try:
            allocate(self._meta, max(META_BYTES * -(-size // self._covered), pool.meta_size + META_BYTES * meta_low))
            allocate(self._data, size)
        except NoSpace as error:
            log.warning("the disks' pool cannot grow, and VMs that write are held when it is full: %s", error)
            return False
        for file in (self._meta, self._data):
            run(["losetup", "--set-capacity", str(loopdev.attach(file))])
        devmapper.reload(POOL, [self._table()])
        log.info("the disks' pool has %d bytes now", self._data.stat().st_size)
        return True

    def _require_own_files(self) -> None:
        """Raise BadDisk if the pool runs over other files than the folder has now: those are lost with a reboot."""
        files = (self._meta, self._data)
        numbers = devmapper.numbers_in(devmapper.table(POOL))
        if not all(loopdev.is_over(number, file) for number, file in zip(numbers, files, strict=True)):
            raise BadDisk(
                f"the disks' pool runs over other files than {self._meta} and {self._data}: this folder was moved or"
                " set back while VMs' disks were open; bring it back as it was, or stop the VMs and reboot"
            )

    def _table(self) -> str:
        sectors = self._data.stat().st_size // SECTOR // BLOCK_SECTORS * BLOCK_SECTORS
        low = self._step // 2 // SECTOR // BLOCK_SECTORS
        devices = f"{loopdev.attach(self._meta)} {loopdev.attach(self._data)}"
        return f"0 {sectors} thin-pool {devices} {BLOCK_SECTORS} {low} {_FEATURES}"


class _PoolWatch:
    """A thread that has the pool grow: at once, and after each event of device-mapper."""

    def __init__(self, pool: ThinPool) -> None:
        self._pool = pool
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
        renewed = -math.inf  # the pool may have been without room, and without an agent, for long
        while not self._stopped.is_set():
            self._alarm.arm()
            if self._has_enough():
                self._alarm.wait()
                continue
            limit = _no_space_timeout()
            if limit and time.monotonic() - renewed > limit / 3:
                _hold_writes_anew()
                renewed = time.monotonic()
            self._stopped.wait(min(_RETRY, limit / 4) if limit else _RETRY)

    def _has_enough(self) -> bool:
        try:
            return self._pool.grow_if_low()
        except (DriverError, OSError) as error:
            log.error("the disks' pool is low on space and could not be grown: %s", error)
            return False


@dataclass(frozen=True)
class _Fill:
    """How full the pool is: blocks of data in use, and else bytes."""

    used: int
    size: int
    free: int
    meta_size: int
    meta_free: int

    @classmethod
    def now(cls) -> _Fill:
        """Read the pool's status line. Raises BadDisk if the pool has failed, OSError."""
        status = dmioctl.status(POOL)
        words = status.split()
        if len(words) < 6:
            raise BadDisk(f"the disks' pool has failed: {status}")
        (meta_used, meta), (used, data) = (map(int, word.split("/")) for word in words[4:6])
        block = BLOCK_SECTORS * SECTOR
        return cls(used, data * block, (data - used) * block, meta * _META_BLOCK, (meta - meta_used) * _META_BLOCK)


def is_new(meta: Path) -> bool:
    """Whether no pool has ever had these metadata. Raises OSError."""
    if not meta.exists():
        return True
    with meta.open("rb") as file:
        return not any(file.read(_SUPERBLOCK))


def _check(meta: Path) -> None:
    """Check metadata before they are used, as lvm2 does. Raises BadDisk if they are damaged.

    The kernel does not: after an error it marks them, and lets nobody write until they were checked (thin_check(8)).
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


def _hold_writes_anew() -> None:
    """Have a pool without room hold writes from now on, also if it has begun to fail them. Raises DriverError."""
    if _OUT_OF_SPACE in dmioctl.status(POOL).split():
        devmapper.reload(POOL, devmapper.table(POOL).splitlines())
