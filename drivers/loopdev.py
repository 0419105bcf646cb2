"""Loop devices over files (losetup(8), loop(4)). All calls are idempotent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from drivers.command import run

log = logging.getLogger(__name__)

_CONTROL = Path("/dev/loop-control")
_CTL_GET_FREE, _CONFIGURE, _SET_DIRECT_IO = 0x4C82, 0x4C0A, 0x4C08  # linux/loop.h
_CONFIG = struct.Struct("=II52xI240x")
"""struct loop_config: file, bytes of a block, and of struct loop_info64 only the flags."""
_READ_ONLY, _AUTOCLEAR = 1, 4
_SECTOR = 512
_TRIES = 32


def attach(file: Path, *, read_only: bool = False, direct: bool = True) -> Path:
    """The loop device of a file or a device, made if there is none. ``direct``: past the page cache of the file, unless
    it lies on a disk with larger sectors.

    Its own sectors are of 512 bytes everywhere, or VMs would not find the partitions of their images.

    Raises CommandFailed, ToolMissing, OSError.
    """
    loop = device_of(file)
    if loop is None:
        options = [f"--sector-size={_SECTOR}", *(["--read-only"] if read_only else [])]
        loop = Path(run(["losetup", "--find", "--show", *options, str(file)]).stdout.strip())
    if direct:
        _pass_page_cache(loop, file)
    return loop


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
    """The loop device of a file, if there is one."""
    return next((device for device, backing in _devices().items() if backing == str(file)), None)


def files() -> frozenset[Path]:
    """The files that have a loop device."""
    return frozenset(Path(backing) for backing in _devices().values())


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


def _configured(fd: int, opened: contextlib.ExitStack) -> Path:
    """A new read-only loop device over an open one; it is open itself."""
    for tries_left in reversed(range(_TRIES)):
        device = _free_device()
        loop = os.open(device, os.O_RDONLY)
        opened.callback(os.close, loop)
        try:
            fcntl.ioctl(loop, _CONFIGURE, _CONFIG.pack(fd, 0, _READ_ONLY | _AUTOCLEAR))
            break
        except OSError as error:
            if error.errno != errno.EBUSY or not tries_left:  # busy: somebody was faster
                raise
    return device


def _free_device() -> Path:
    with _CONTROL.open("rb", buffering=0) as control:
        return Path(f"/dev/loop{fcntl.ioctl(control, _CTL_GET_FREE)}")


def _devices() -> dict[Path, str]:
    """What each loop device is over (Linux: drivers/block/loop.c, loop_attr_backing_file_show)."""
    found = {}
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # it may be going
            found[Path("/dev") / file.parts[3]] = file.read_text().rstrip("\n")
    return found
