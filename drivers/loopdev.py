"""Loop devices over files (losetup(8), loop(4)). All calls are idempotent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from pathlib import Path

from drivers.command import run

_CONTROL = Path("/dev/loop-control")
_CTL_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A  # linux/loop.h
_CONFIG = struct.Struct("=II52xI240x")
"""struct loop_config: file, bytes of a block, and of struct loop_info64 only the flags."""
_READ_ONLY = 1


def attach(file: Path, *, read_only: bool = False, direct: bool = True) -> Path:
    """The loop device of a file or a device, made if there is none. ``direct``: past the page cache of the file.

    Raises CommandFailed, ToolMissing.
    """
    found = device_of(file)
    if found is not None:
        return found
    options = [*(["--read-only"] if read_only else []), *(["--direct-io=on"] if direct else [])]
    return Path(run(["losetup", "--find", "--show", *options, str(file)]).stdout.strip())


def attach_for_random_reads(device: Path, count: int) -> list[Path]:
    """So many loop devices over one block device that read through its pages in memory, and nothing ahead.

    The advice is one of an open file, which the kernel goes on to use: losetup cannot give it (posix_fadvise(2)).

    Raises OSError.
    """
    found = _devices_of(device)
    return found + [_configured(device) for _ in range(count - len(found))]


def detach(file: Path) -> None:
    """Remove the loop devices of a file; their users must have closed them. Raises CommandFailed."""
    found = _devices_of(file)
    if found:
        run(["losetup", "--detach", *map(str, found)])


def device_of(file: Path) -> Path | None:
    """The loop device of a file, if there is one."""
    return next(iter(_devices_of(file)), None)


def files() -> frozenset[Path]:
    """The files that have a loop device."""
    return frozenset(Path(backing) for backing in _devices().values())


def _devices_of(file: Path) -> list[Path]:
    return [device for device, backing in _devices().items() if backing == str(file)]


def _configured(device: Path) -> Path:
    """A new read-only loop device over a block device."""
    fd = os.open(device, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        while True:
            loop = _free_device()
            with loop.open("rb", buffering=0) as opened:
                try:
                    fcntl.ioctl(opened, _CONFIGURE, _CONFIG.pack(fd, 0, _READ_ONLY))
                except OSError as error:
                    if error.errno == errno.EBUSY:  # somebody was faster
                        continue
                    raise
            return loop
    finally:
        os.close(fd)


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
