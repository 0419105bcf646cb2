"""Loop devices over files (losetup(8), loop(4)). All calls are idempotent, and raise CommandFailed, OSError."""

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
"""The kernel's name of a device that ``held`` has made. Somebody else may have a device over the same file: another
part of it, with other sectors, or to write."""
_READ_ONLY, _AUTOCLEAR = 1, 4
_SECTOR = 512
_TRIES = 32
_GONE = frozenset({errno.ENOENT, errno.ENODEV, errno.ENXIO})
"""Errors of a loop device that is over nothing, or is going."""


@dataclass(frozen=True)
class Backing:
    """What a loop device is over. ``path``: of the file when it was opened, or " (deleted)" behind it."""

    device: Path
    path: str

    def is_over(self, file: Path, name: bytes | None = None) -> bool:
        """Whether the device is over this very file, by whatever path, and has this name if one is given.

        A path alone may lead to another file by now: one that was made after the first was lost, or is mounted over it.
        """
        if Path(self.path).name != file.resolve().name:
            return False
        try:
            stat, (device, inode, found) = file.stat(), self._status()
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return False
        return (device, inode) == (_encoded(stat.st_dev), stat.st_ino) and name in (None, found.rstrip(b"\0"))

    def _status(self) -> tuple[int, int, bytes]:
        status = bytearray(_STATUS.size)
        with self.device.open("rb", buffering=0) as device:
            fcntl.ioctl(device, _GET_STATUS, status)
        number, inode, name = _STATUS.unpack(status)
        return number, inode, name


def attach(file: Path, *, read_only: bool = False, direct: bool = True) -> Path:
    """The loop device of a file or a device, made if there is none.

    ``direct``: past the page cache of the file, unless it lies on a disk with larger sectors. The sectors of the loop
    device are of 512 bytes everywhere, or VMs would not find the partitions of their images.
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
    """A read-only loop device of a whole file, for all who call this at a time and for nobody else.

    The kernel removes the device when nobody has it open any more. Whoever does not have it open yet would then find
    nothing behind its number, or another file.
    """
    udevrules.apply()
    for _ in range(_TRIES):
        with contextlib.ExitStack() as opened:
            loop = device_of(file, _HELD)
            if loop is None:
                loop = _configured(opened.enter_context(file.open("rb", buffering=0)).fileno(), opened, _HELD)
            else:
                opened.enter_context(loop.open("rb", buffering=0))
            backing = _backing(loop)
            if backing is not None and backing.is_over(file):  # else it went before it was open
                yield loop
                return
    raise OSError(errno.EBUSY, "its loop devices go as soon as they are made", str(file))


@contextlib.contextmanager
def random_readers(device: Path, count: int) -> Iterator[list[Path]]:
    """So many loop devices over one block device that read through its pages in memory, and nothing ahead.

    The kernel removes them when nobody has them open any more. It goes on to use the advice of the open file, which
    losetup cannot give (posix_fadvise(2)).
    """
    with contextlib.ExitStack() as opened, device.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        yield [_configured(file.fileno(), opened) for _ in range(count)]


def detach(file: Path) -> None:
    """Remove the loop device of a file; its user must have closed it."""
    found = device_of(file)
    if found is not None:
        run(["losetup", "--detach", str(found)])


def device_of(file: Path, name: bytes | None = None) -> Path | None:
    """The loop device of a file, if there is one. ``name``: as the kernel has it."""
    return next((device for device, backing in backings().items() if backing.is_over(file, name)), None)


def is_over(number: str, file: Path) -> bool:
    """Whether the device of this number, as a map's table names it, is a loop device over this very file."""
    backing = _backing(Path("/dev", Path("/sys/dev/block", number).resolve().name))
    return backing is not None and backing.is_over(file)


def backings() -> dict[Path, Backing]:
    """What each loop device is over."""
    devices = [Path("/dev", entry.name) for entry in Path("/sys/block").iterdir() if entry.name.startswith("loop")]
    return {device: backing for device in devices if (backing := _backing(device)) is not None}


def _encoded(device: int) -> int:
    """A device's number as the kernel writes it in 64 bits (Linux: linux/kdev_t.h, huge_encode_dev)."""
    minor = os.minor(device)
    return minor & 0xFF | os.major(device) << 8 | (minor & ~0xFF) << 12


def _pass_page_cache(loop: Path, file: Path) -> None:
    """If the disk of the file allows it. losetup would open the file with O_DIRECT: the loop device then gets the
    larger sectors of its disk, or fails what is smaller (Linux: drivers/block/loop.c, loop_configure).
    """
    try:
        with loop.open("rb", buffering=0) as device:
            fcntl.ioctl(device, _SET_DIRECT_IO, 1)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        log.info("%s goes through the page cache too: its disk has larger sectors, or knows no direct I/O", file)


def _configured(fd: int, opened: contextlib.ExitStack, name: bytes = b"") -> Path:
    """A new read-only loop device over an open file; the device is open until ``opened`` is left."""
    for tries_left in reversed(range(_TRIES)):
        device = _free_device()
        loop = opened.enter_context(device.open("rb", buffering=0))
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


def _backing(device: Path) -> Backing | None:
    """What a loop device is over, None if nothing (Linux: drivers/block/loop.c, loop_attr_backing_file_show)."""
    try:
        return Backing(device, Path("/sys/block", device.name, "loop/backing_file").read_text().rstrip("\n"))
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None
