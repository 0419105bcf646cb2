"""A VM's private disk: a thin volume whose unwritten blocks are read from the image's device on this host.

All disks of a host share one pool in two files of ``<state>/thin``. The data file takes its disk space before the pool
is told of it, so that a write to a VM's disk never meets a full file system; it grows by ``step`` bytes whenever less
than half a step is left. When the file system is full, the kernel holds the VMs' writes until there is room.
(Linux: admin-guide/device-mapper/thin-provisioning, "external snapshots" and "low water mark".)
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from drivers import devmapper, loopdev
from drivers.base import Device, Existing, Place
from drivers.command import run, tool
from drivers.devmapper import SECTOR
from drivers.errors import BadDevice, BadDisk, CommandFailed, DriverError, NoSpace, SnapshotMissing
from drivers.names import checked
from drivers.needs import DEVICE_MAPPER, DMSETUP, LOOP, LOSETUP, Needs

log = logging.getLogger(__name__)

POOL = "virtman-pool"
DISK_PREFIX = "virtman-vm-"

STEP = 1 << 30
"""Bytes by which the pool grows."""

BLOCK_SECTORS = 128
"""What a first write copies from the image: 64 KiB, the smallest block that the kernel allows."""

META_BYTES = 64 << 20
"""Enough for 80 GiB of written blocks, by the kernel document's 48 bytes a block."""

_RETRY = 5.0
_NO_SPACE_TIMEOUT = Path("/sys/module/dm_thin_pool/parameters/no_space_timeout")


@dataclass(frozen=True)
class _Disk:
    """What is written down of a disk before it is made. ``size`` in bytes."""

    number: int
    size: int
    origin: str


class DmThinSnapshot:
    """Disks of VMs as ``/dev/mapper/virtman-vm-<vm>``. ``step`` in bytes: see STEP."""

    needs = Needs(tools=(DMSETUP, LOSETUP), modules=("dm_thin_pool",), nodes=(DEVICE_MAPPER, LOOP), root=True)

    def __init__(self, place: Place, *, step: int = STEP) -> None:
        self._folder = place.state / "thin"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._step = step
        self._lock = threading.Lock()
        self._watch: _Watch | None = None

    def create(self, vm: str, origin: Device, size: int) -> Device:
        """A disk of ``size`` bytes over the kernel device ``origin``, whose path is the same after a reboot.

        Raises BadDisk if the size is below the image's or no multiple of 512; BadDevice, BadName, NoSpace,
        CommandFailed.
        """
        if origin.path is None:
            raise BadDevice(f"VM {vm}: the origin is no kernel device")
        if size < origin.size or size % SECTOR:
            raise BadDisk(f"VM {vm}: {size} is not a disk size: a multiple of {SECTOR}, and at least {origin.size}")
        with self._lock:
            if not self._record(vm).exists():
                self._make_room()
                number = 1 + max((disk.number for disk in self._disks().values()), default=0)
                self._write(vm, _Disk(number, size, str(origin.path)))
            return self._activate(vm)

    def open(self, vm: str) -> Device:
        """The VM's disk, made usable if the host was down. Raises SnapshotMissing, BadName, CommandFailed."""
        with self._lock:
            return self._activate(vm)

    def delete(self, vm: str) -> None:
        """Remove the VM's disk, whole or half made; with the last one the pool goes too. Raises CommandFailed."""
        with self._lock:
            if not self._record(vm).exists():
                return
            devmapper.remove(DISK_PREFIX + vm)
            disk = self._read(vm)
            if (self._folder / "data").exists():  # else there was no room for the pool, and nothing was made in it
                self._activate_pool()
                self._tell_pool(f"delete {disk.number}", but="No data available")
            self._record(vm).unlink()
            if not self._disks():
                self._remove_pool()

    def existing(self) -> Existing:
        """VMs with a disk, whole or half made."""
        details = {path.stem: f"thin volume over {self._folder}" for path in self._folder.glob("*.json")}
        maps = (name.removeprefix(DISK_PREFIX) for name in devmapper.names(DISK_PREFIX))
        return Existing(frozenset(details | {name: "a map without a record" for name in maps if name not in details}))

    def close(self) -> None:
        """Stop watching the pool's space; disks stay usable."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    # Records

    def _record(self, vm: str) -> Path:
        return self._folder / f"{checked(vm)}.json"

    def _read(self, vm: str) -> _Disk:
        path = self._record(vm)
        try:
            return _Disk(**json.loads(path.read_text()))
        except FileNotFoundError:
            raise SnapshotMissing(vm) from None
        except (ValueError, TypeError) as error:
            raise BadDisk(f"the record of VM {vm} is damaged: {path}: {error}") from error

    def _disks(self) -> dict[str, _Disk]:
        return {path.stem: self._read(path.stem) for path in self._folder.glob("*.json")}

    def _write(self, vm: str, disk: _Disk) -> None:
        fresh = self._folder / f"{vm}.new"
        with fresh.open("w") as file:
            json.dump(asdict(disk), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._record(vm))

    # The pool

    def _activate(self, vm: str) -> Device:
        disk = self._read(vm)
        self._activate_pool()
        if not devmapper.exists(DISK_PREFIX + vm):
            self._tell_pool(f"create_thin {disk.number}", but="File exists")
            pool, sectors = devmapper.map_path(POOL), disk.size // SECTOR
            devmapper.create(DISK_PREFIX + vm, [f"0 {sectors} thin {pool} {disk.number} {disk.origin}"])
        return Device(size=disk.size, path=devmapper.map_path(DISK_PREFIX + vm))

    def _activate_pool(self) -> None:
        if not devmapper.exists(POOL):
            meta, data = self._folder / "meta", self._folder / "data"
            _allocate(meta, META_BYTES)
            _allocate(data, self._step)
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
        data = self._folder / "data"
        try:
            _allocate(data, data.stat().st_size + self._step)
        except NoSpace as error:
            log.warning("the disks' pool cannot grow, and VMs that write are held when it is full: %s", error)
            return False
        run(["losetup", "--set-capacity", str(loopdev.attach(data))])
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
            except DriverError as error:
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


def _blocks(status: str) -> tuple[int, int]:
    """Used and all data blocks of a pool, by its status line."""
    used, total = status.split()[5].split("/")
    return int(used), int(total)


def _allocate(file: Path, size: int) -> None:
    """Make the file ``size`` bytes long, with all its disk space. Raises NoSpace."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        before = os.fstat(fd).st_size
        if before >= size:
            return
        try:
            os.posix_fallocate(fd, before, size - before)
        except OSError as error:
            os.ftruncate(fd, before)
            if not before:
                file.unlink()
            stat = os.statvfs(file.parent)
            raise NoSpace(file, stat.f_bavail * stat.f_frsize, size - before) from error
    finally:
        os.close(fd)
