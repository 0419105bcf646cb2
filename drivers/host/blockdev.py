"""Block devices as the kernel tells of them: which one it is, its size, and whether it may be written to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

_BLKROSET, _BLKROGET = 0x125D, 0x125E  # linux/fs.h
_NAMES = ("dm/uuid", "wwid", "device/wwid", "device/vpd_pg83", "serial", "device/serial")
"""Where below its folder in sysfs a device may have a name that it keeps over reboots, and on all hosts that see it:
device-mapper's (Linux: ABI/testing/sysfs-block-dm), NVMe's, SCSI's, virtio's and MMC's."""

SYS = Path("/sys")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

THIS_BOOT = "boot "
"""Begins the identity of a device that has no name of its own: it is good until the host boots."""


def identity(rdev: int, sys: Path = SYS, boot_id: Path = BOOT_ID) -> str:
    """What tells a device from all others. Raises OSError if it is gone.

    A device without a lasting name (a loop device, say) is known by its number and by how many disks the kernel had
    seen when this one came (Linux: diskseq, since 5.15): another one of the same number is told apart.
    """
    folder = sys / "dev/block" / number(rdev)
    if (folder / "partition").exists():
        whole = folder.resolve().parent
        return f"{_whole(whole, boot_id)} partition {_word(folder / 'partition')} from {_word(folder / 'start')}"
    return _whole(folder, boot_id)


def _whole(folder: Path, boot_id: Path) -> str:
    for name in _NAMES:
        if told := _content_of(folder / name):
            return f"{name} {told}"
    resolved = folder.resolve(strict=True)
    seen = _content_of(resolved / "diskseq")
    return f"{THIS_BOOT}{boot_id.read_text().strip()} {_word(resolved / 'dev')} {seen}".rstrip()


def is_numbered_like(one: str, other: str) -> bool:
    """Whether two identities are of the same device, or of devices without a lasting name that have had one number
    since the boot: what the kernel was told of the first of these holds for the second, too.
    """
    return one == other or (one.startswith(THIS_BOOT) and one.split()[:3] == other.split()[:3])


def instance(rdev: int, sys: Path = SYS) -> str:
    """What differs when a device has gone and come back, even as the same one: who has it open has the old one."""
    folder = (sys / "dev/block" / number(rdev)).resolve()
    folder = folder.parent if (folder / "partition").exists() else folder
    return f"{number(rdev)} {_content_of(folder / 'diskseq')}"


def nodes(wanted: str, sys: Path = SYS, boot_id: Path = BOOT_ID) -> Iterator[Path]:
    """Where devices are now of which what the kernel was told of one of this identity holds."""
    for folder in (sys / "dev/block").iterdir():
        major, minor = map(int, folder.name.split(":"))
        try:
            found = identity(os.makedev(major, minor), sys, boot_id)
            told = (folder / "uevent").read_text()
        except OSError:  # it is going
            continue
        name = re.search("^DEVNAME=(.+)$", told, re.MULTILINE)
        if name is not None and is_numbered_like(wanted, found):
            yield Path("/dev") / name[1]


def number(rdev: int) -> str:
    """``major:minor``."""
    return f"{os.major(rdev)}:{os.minor(rdev)}"


def map_uuid(rdev: int, sys: Path = SYS) -> str:
    """The UUID of a device-mapper's map; empty for other devices and for maps without one."""
    return _content_of(sys / "dev/block" / number(rdev) / "dm/uuid")


def backing_file(rdev: int, sys: Path = SYS) -> str:
    """The path of the file that a loop device is over; empty for other devices."""
    return _content_of(sys / "dev/block" / number(rdev) / "loop/backing_file")


def size(fd: int) -> int:
    """Bytes of an open device. Raises OSError."""
    return os.lseek(fd, 0, os.SEEK_END)


def is_read_only(fd: int) -> bool:
    """Whether the kernel refuses to write to an open device. Raises OSError."""
    (answer,) = struct.unpack("=i", fcntl.ioctl(fd, _BLKROGET, bytes(4)))
    return bool(answer)


def set_read_only(fd: int, *, read_only: bool) -> None:
    """Have the kernel refuse to write to an open device, or not. Raises OSError (only root may)."""
    fcntl.ioctl(fd, _BLKROSET, struct.pack("=i", read_only))


def is_held(fd: int) -> bool:
    """Whether somebody has claimed an open device, or a partition of it, for himself: a mount, a map, swap (open(2),
    O_EXCL). Raises OSError.
    """
    try:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return True
    return False


def _content_of(file: Path) -> str:
    """What a file in sysfs says, bytes that are no text in hexadecimal; empty if there is no such file."""
    with contextlib.suppress(OSError):
        said = file.read_bytes()
        text = said.strip(b"\0\n ")
        return text.decode("ascii") if text.isascii() and text.decode("ascii").isprintable() else said.hex()
    return ""


def _word(file: Path) -> str:
    return file.read_text().strip()
