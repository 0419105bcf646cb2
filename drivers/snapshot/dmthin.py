"""A VM's private disk: a thin volume whose unwritten blocks are read from the image's device on this host.

All disks of a host share one pool in two files of ``<state>/thin``. The data file takes its disk space before the pool
is told of it, so that a write to a VM's disk never meets a full file system; it grows by ``step`` bytes whenever less
than half a step is left. When the file system is full, the kernel holds the VMs' writes until there is room.
(Linux: admin-guide/device-mapper/thin-provisioning, "external snapshots" and "low water mark".)
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from drivers import devmapper, loopdev
from drivers.base import Device, Existing, Place
from drivers.command import run, tool
from drivers.devmapper import SECTOR
from drivers.errors import BadDisk, CommandFailed, DriverError, NoSpace
from drivers.needs import DEVICE_MAPPER, DMSETUP, LOOP, LOSETUP, UDEVADM, Needs, Tool
from drivers.snapshot.disks import DISK_PREFIX, Records, checked_origin, found
from drivers.space import allocate, shortage

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

_SUPERBLOCK = 4096
"""Bytes of the first block of metadata: the kernel takes zeros there for new metadata."""

_CHECK_LIMIT = 600.0
"""Seconds: it reads all metadata, and a large pool on a slow disk has gigabytes of them."""

_RETRY = 5.0
_NO_SPACE_TIMEOUT = Path("/sys/module/dm_thin_pool/parameters/no_space_timeout")


@dataclass(frozen=True)
class _Disk:
    """What is written down of a disk before it is made. ``size`` in bytes."""

    number: int
    size: int
    origin: str


class DmThinSnapshot:
    """Disks of VMs as ``/dev/mapper/virtman-vm-<vm>``. ``step`` and ``covered`` in bytes: see STEP and COVERED."""

    needs = Needs(
        tools=(DMSETUP, LOSETUP, UDEVADM, Tool("thin_check", "thin-provisioning-tools")),
        modules=("dm_thin_pool",),
        nodes=(DEVICE_MAPPER, LOOP),
        root=True,
    )

    def __init__(self, place: Place, *, step: int = STEP, covered: int = COVERED) -> None:
        self._folder = place.state / "thin"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._records = Records(self._folder, _Disk)
        self._step, self._covered = step, covered
        self._lock = threading.Lock()
        self._watch: _Watch | None = None

    def create(self, vm: str, origin: Device, size: int) -> Device:
        """A disk of ``size`` bytes over the kernel device ``origin``, whose path is the same after a reboot.

        Raises BadDisk if the size is below the image's or no multiple of 512; BadDevice, BadName, NoSpace,
        CommandFailed.
        """
        path = checked_origin(vm, origin, size)
        with self._lock:
            if not self._records.path(vm).exists():
                self._make_room()
                number = 1 + max((disk.number for disk in self._records.all().values()), default=0)
                self._records.write(vm, _Disk(number, size, str(path)))
            return self._activate(vm)

    def open(self, vm: str) -> Device:
        """The VM's disk, made usable if the host was down. Raises SnapshotMissing, BadName, CommandFailed."""
        with self._lock:
            return self._activate(vm)

    def delete(self, vm: str) -> None:
        """Remove the VM's disk, whole or half made; with the last one the pool goes too. Raises CommandFailed."""
        with self._lock:
            if not self._records.path(vm).exists():
                return
            devmapper.remove(DISK_PREFIX + vm)
            disk = self._records.read(vm)
            if (self._folder / "data").exists():  # else there was no room for the pool, and nothing was made in it
                self._activate_pool()
                self._tell_pool(f"delete {disk.number}", but="No data available")
            self._records.path(vm).unlink()
            if not self._records.all():
                self._remove_pool()

    def existing(self) -> Existing:
        """VMs with a disk, whole or half made."""
        return found(self._folder.glob("*.json"), f"thin volume over {self._folder}")

    def trouble(self) -> str:
        """Whether there is room for the pool's next step."""
        return shortage(self._folder, self._step) if devmapper.exists(POOL) else ""

    def close(self) -> None:
        """Stop watching the pool's space; disks stay usable."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    # The pool

    def _activate(self, vm: str) -> Device:
        disk = self._records.read(vm)
        self._activate_pool()
        if not devmapper.exists(DISK_PREFIX + vm):
            self._tell_pool(f"create_thin {disk.number}", but="File exists")
            pool, sectors = devmapper.map_path(POOL), disk.size // SECTOR
            devmapper.create(DISK_PREFIX + vm, [f"0 {sectors} thin {pool} {disk.number} {disk.origin}"])
        return Device(size=disk.size, path=devmapper.map_path(DISK_PREFIX + vm))

    def _activate_pool(self) -> None:
        if not devmapper.exists(POOL):
            meta, data = self._folder / "meta", self._folder / "data"
            allocate(meta, META_BYTES)
            allocate(data, self._step)
            _check(meta)
            _NO_SPACE_TIMEOUT.write_text("0")  # hold writes for as long as it takes
            devmapper.create(POOL, [self._pool_line()])
        if self._watch is None:
            self._watch = _Watch(self._grow_if_low)

    def _pool_line(self) -> str:
        meta, data = self._folder / "meta", self._folder / "data"
        sectors = data.stat().st_size // SECTOR // BLOCK_SECTORS * BLOCK_SECTORS
        low = self._step // 2 // SECTOR // BLOCK_SECTORS
        devices = f"{loopdev.attach(meta)} {loopdev.attach(data)}"
        return f"0 {sectors} thin-pool {devices} {BLOCK_SECTORS} {low} 0"

    def _tell_pool(self, text: str, *, but: str) -> None:
        """Send a message. A failure that says ``but`` means that it was done before."""
        try:
            devmapper.message(POOL, text)
        except CommandFailed as error:
            if but not in error.stderr:
                raise

    def _remove_pool(self) -> None:
        self.close()
        devmapper.remove(POOL)
        for name in ("data", "meta"):
            loopdev.detach(self._folder / name)
            (self._folder / name).unlink(missing_ok=True)

    def _make_room(self) -> None:
        free = os.statvfs(self._folder).f_bavail * os.statvfs(self._folder).f_frsize
        needed = 0 if (self._folder / "data").exists() else META_BYTES + self._step
        if free < needed:
            raise NoSpace(self._folder, free, needed)

    def _grow_if_low(self) -> bool:
        """Give the pool another step of space if it is running low. False if the file system has no room for it."""
        used, total = _blocks(devmapper.status(POOL))
        if (total - used) * BLOCK_SECTORS * SECTOR > self._step // 2:
            return True
        meta, data = self._folder / "meta", self._folder / "data"
        size = data.stat().st_size + self._step
        try:
            allocate(meta, META_BYTES * -(-size // self._covered))
            allocate(data, size)
        except NoSpace as error:
            log.warning("the disks' pool cannot grow, and VMs that write are held when it is full: %s", error)
            return False
        for file in (meta, data):
            run(["losetup", "--set-capacity", str(loopdev.attach(file))])
        devmapper.reload(POOL, [self._pool_line()])
        log.info("the disks' pool has %d bytes now", data.stat().st_size)
        return True


class _Watch:
    """Has the pool grow, at once and after each event of the pool, in a thread of its own."""

    def __init__(self, grow_if_low: Callable[[], bool]) -> None:
        self._grow_if_low = grow_if_low
        self._closed = False
        self._lock = threading.Lock()
        self._waiting: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="pool-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; the pool stays."""
        with self._lock:
            self._closed = True
            if self._waiting is not None:
                self._waiting.kill()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            seen, enough = devmapper.events(POOL), False
            try:
                enough = self._grow_if_low()
            except (DriverError, OSError) as error:
                log.error("the disks' pool is low on space and could not be grown: %s", error)
            self._wait(seen, None if enough else _RETRY)

    def _wait(self, seen: int, timeout: float | None) -> None:
        """Until the pool's next event, or for ``timeout`` seconds."""
        with self._lock:
            if self._closed:
                return
            self._waiting = subprocess.Popen([tool("dmsetup"), "wait", POOL, str(seen)], stdout=subprocess.DEVNULL)
        try:
            self._waiting.wait(timeout)
        except subprocess.TimeoutExpired:
            self._waiting.kill()
            self._waiting.wait()


def _check(meta: Path) -> None:
    """Look through metadata before they are used, as lvm2 does. Raises BadDisk if they are damaged.

    The kernel does not: after an error it marks them, and lets nobody write until somebody has looked (thin_check(8)).
    """
    with meta.open("rb") as file:
        if not any(file.read(_SUPERBLOCK)):
            return  # they are new
    log.info("checking the metadata of the disks' pool: %s", meta)
    try:
        run(["thin_check", "-q", "--clear-needs-check-flag", str(meta)], timeout=_CHECK_LIMIT)
    except CommandFailed as error:
        raise BadDisk(f"the metadata of the disks' pool are damaged, see thin_repair(8): {meta}: {error}") from error


def _blocks(status: str) -> tuple[int, int]:
    """Used and all data blocks of a pool, by its status line. Raises BadDisk if it has failed."""
    words = status.split()
    if len(words) < 6:
        raise BadDisk(f"the disks' pool has failed: {status}")
    used, total = words[5].split("/")
    return int(used), int(total)
