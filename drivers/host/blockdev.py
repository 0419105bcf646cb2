"""Block devices: the identity of a device, its size, and whether it may be written to.

Calls with an open device raise OSError.
"""

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
"""Files in sysfs with a name that a device keeps over reboots and on all hosts: device-mapper's (Linux: ABI/testing/
sysfs-block-dm), NVMe's, SCSI's, virtio's and MMC's."""

SYS = Path("/sys")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

THIS_BOOT = "boot "
"""Begins the identity of a device that has no lasting name: it is good until the host boots."""


def identity(rdev: int, sys: Path = SYS, boot_id: Path = BOOT_ID) -> str:
    """Tells a device from all others. Raises OSError if it is gone.

    Without a lasting name (a loop device, say) it is made of the device's number and diskseq (Linux, since 5.15), which
    differs for a later device of the same number.
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
    """Whether two identities are of one device, or of devices without a lasting name that had one number since the
    boot: settings in the kernel of the first device hold for the second, too.
    """
    return one == other or (one.startswith(THIS_BOOT) and one.split()[:3] == other.split()[:3])


def instance(rdev: int, sys: Path = SYS) -> str:
    """Differs when a device went and came back, even as the same one: who has it open has the old one."""
    folder = (sys / "dev/block" / number(rdev)).resolve()
    folder = folder.parent if (folder / "partition").exists() else folder
    return f"{number(rdev)} {_content_of(folder / 'diskseq')}"


def nodes(wanted: str, sys: Path = SYS, boot_id: Path = BOOT_ID) -> Iterator[Path]:
    """The paths of all present devices that are numbered like one of this identity."""
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
    """Bytes of an open device."""
    return os.lseek(fd, 0, os.SEEK_END)


def is_read_only(fd: int) -> bool:
    """Whether the kernel refuses writes to an open device."""
    (answer,) = struct.unpack("=i", fcntl.ioctl(fd, _BLKROGET, bytes(4)))
    return bool(answer)


def set_read_only(fd: int, *, read_only: bool) -> None:
    """Have the kernel refuse writes to an open device, or not. Only root may."""
    fcntl.ioctl(fd, _BLKROSET, struct.pack("=i", read_only))


def is_held(fd: int) -> bool:
    """Whether a mount, a map, swap or the like has claimed an open device, or a partition of it (open(2), O_EXCL)."""
    try:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return True
    return False


def _content_of(file: Path) -> str:
    """The content of a file in sysfs, in hexadecimal if it is no text; empty if there is no such file."""
    with contextlib.suppress(OSError):
        said = file.read_bytes()
        text = said.strip(b"\0\n ")
        return text.decode("ascii") if text.isascii() and text.decode("ascii").isprintable() else said.hex()
    return ""


def _word(file: Path) -> str:
    return file.read_text().strip()
