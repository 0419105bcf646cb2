"""Loop devices over files (losetup(8), loop(4)). All calls are idempotent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drivers.host.command import run
from drivers.kernel import udevrules

log = logging.getLogger(__name__)

_CONTROL = Path("/dev/loop-control")
_CTL_GET_FREE, _CONFIGURE, _SET_DIRECT_IO, _GET_STATUS = 0x4C82, 0x4C0A, 0x4C08, 0x4C05  # linux/loop.h
_CONFIG = struct.Struct("=II52xI64s176x")
"""struct loop_config: file, bytes of a block, and of struct loop_info64 only the flags and the name."""
_STATUS = struct.Struct("=2Q40x64s112x")
"""struct loop_info64: the file's device and inode, and the name."""
_HELD = b"virtman-held"
"""The name of what ``held`` has made. Somebody else may have a device over the same file: another part of it, with
other sectors, or to write.
"""
_READ_ONLY, _AUTOCLEAR = 1, 4
_SECTOR = 512
_TRIES = 32


@dataclass(frozen=True)
class Backing:
    """What a loop device is over. ``path``: as the file was called when it was opened, or " (deleted)" behind it."""

    device: Path
    path: str

    def is_over(self, file: Path) -> bool:
        """Whether it is over this very file, by whatever path.

        A path alone may lead to another file by now: one that was made after the first was lost, or is mounted over it.
        """
        if Path(self.path).name != file.resolve().name:
            return False
        try:
            stat = file.stat()
            return self._status()[:2] == (_encoded(stat.st_dev), stat.st_ino)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno != errno.ENXIO:  # it is over nothing any more
                raise
            return False

    def is_named(self, name: bytes) -> bool:
        """Whether the kernel keeps this name of it. Raises OSError if it is over nothing any more."""
        return self._status()[2] == name

    def _status(self) -> tuple[int, int, bytes]:
        fd = os.open(self.device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = bytearray(_STATUS.size)
            fcntl.ioctl(fd, _GET_STATUS, status)
        finally:
            os.close(fd)
        device, inode, name = _STATUS.unpack(status)
        return device, inode, name.rstrip(b"\0")


def attach(file: Path, *, read_only: bool = False, direct: bool = True) -> Path:
    """The loop device of a file or a device, made if there is none. ``direct``: past the page cache of the file, unless
    it lies on a disk with larger sectors.

    Its own sectors are of 512 bytes everywhere, or VMs would not find the partitions of their images.

    Raises CommandFailed, ToolMissing, OSError.
    """
    loop = device_of(file)
    if loop is None:
        udevrules.apply()
        options = [f"--sector-size={_SECTOR}", *(["--read-only"] if read_only else [])]
        loop = Path(run(["losetup", "--find", "--show", *options, str(file)]).stdout.strip())
    if direct:
        _pass_page_cache(loop, file)
    return loop


@contextlib.contextmanager
def held(file: Path) -> Iterator[Path]:
    """A read-only loop device of a whole file that several may use at a time, and nobody else has.

    It goes by itself when nobody has it open any more. Who does not hold it open yet would find nothing behind its
    number then, or the next one's file.

    Raises CommandFailed, ToolMissing, OSError.
    """
    udevrules.apply()
    for _ in range(_TRIES):
        with contextlib.ExitStack() as opened:
            loop = _held_one(file)
            if loop is None:
                fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, fd)
                loop = _configured(fd, opened, _HELD)
            else:
                opened.enter_context(loop.open("rb", buffering=0))
            backing = _backing(loop)
            if backing is not None and backing.is_over(file):  # else it went before it was open
                yield loop
                return
    raise OSError(errno.EBUSY, "its loop devices go as soon as they are made", str(file))


def _held_one(file: Path) -> Path | None:
    """What ``held`` has made for a file."""
    for device, backing in backings().items():
        with contextlib.suppress(OSError):  # it is going
            if backing.is_over(file) and backing.is_named(_HELD):
                return device
    return None


@contextlib.contextmanager
def random_readers(device: Path, count: int) -> Iterator[list[Path]]:
    """So many loop devices over one block device that read through its pages in memory, and nothing ahead.

    They go by themselves when nobody has them open any more. The advice is one of an open file, which the kernel goes
    on to use: losetup cannot give it (posix_fadvise(2)).

    Raises OSError.
    """
    with contextlib.ExitStack() as opened:
        fd = os.open(device, os.O_RDONLY)
        opened.callback(os.close, fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        yield [_configured(fd, opened) for _ in range(count)]


def detach(file: Path) -> None:
    """Remove the loop device of a file; its user must have closed it. Raises CommandFailed."""
    found = device_of(file)
    if found is not None:
        run(["losetup", "--detach", str(found)])


def device_of(file: Path) -> Path | None:
    """The loop device of a file, if there is one. Raises OSError."""
    return next((device for device, backing in backings().items() if backing.is_over(file)), None)


def is_over(number: str, file: Path) -> bool:
    """Whether the device of this number, as a map's table names it, is a loop device over this very file."""
    backing = _backing(Path("/dev", Path("/sys/dev/block", number).resolve().name))
    return backing is not None and backing.is_over(file)


def files() -> frozenset[Path]:
    """The files that have a loop device."""
    return frozenset(Path(backing.path) for backing in backings().values())


def _encoded(device: int) -> int:
    """A device's number as the kernel writes it in 64 bits (Linux: linux/kdev_t.h, huge_encode_dev)."""
    minor = os.minor(device)
    return minor & 0xFF | os.major(device) << 8 | (minor & ~0xFF) << 12


def _pass_page_cache(loop: Path, file: Path) -> None:
    """If the disk of the file allows it. losetup would open the file with O_DIRECT: the loop device then gets the
    larger sectors of its disk, or fails what is smaller (Linux: drivers/block/loop.c, loop_configure).
    """
    fd = os.open(loop, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SET_DIRECT_IO, 1)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        log.info("%s goes through the page cache too: its disk has larger sectors, or knows no direct I/O", file)
    finally:
        os.close(fd)


def _configured(fd: int, opened: contextlib.ExitStack, name: bytes = b"") -> Path:
    """A new read-only loop device over an open one; it is open itself."""
    for tries_left in reversed(range(_TRIES)):
        device = _free_device()
        loop = os.open(device, os.O_RDONLY)
        opened.callback(os.close, loop)
        try:
            fcntl.ioctl(loop, _CONFIGURE, _CONFIG.pack(fd, _SECTOR, _READ_ONLY | _AUTOCLEAR, name))
            break
        except OSError as error:
            if error.errno != errno.EBUSY or not tries_left:  # busy: somebody was faster
                raise
    return device


def _free_device() -> Path:
    with _CONTROL.open("rb", buffering=0) as control:
        return Path(f"/dev/loop{fcntl.ioctl(control, _CTL_GET_FREE)}")


def backings() -> dict[Path, Backing]:
    """What each loop device is over."""
    devices = [Path("/dev", entry.name) for entry in Path("/sys/block").iterdir() if entry.name.startswith("loop")]
    return {device: backing for device in devices if (backing := _backing(device)) is not None}


def _backing(device: Path) -> Backing | None:
    """What a loop device is over, None if nothing (Linux: drivers/block/loop.c, loop_attr_backing_file_show)."""
    try:
        return Backing(device, Path("/sys/block", device.name, "loop/backing_file").read_text().rstrip("\n"))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV, errno.ENXIO):  # it is over nothing, or is going
            raise
        return None
