"""What device-mapper answers and does at once, by ioctl(2) (Linux: linux/dm-ioctl.h, drivers/md/dm-ioctl.c).

Why not dmsetup(8) alone: a process for each question takes a tenth of a second on a busy host, monitors ask at each
event, and events can be awaited by poll(2) alone. Why not ioctls alone: what may wait for requests or for a disk is for
a process, since a process can be killed (drivers/kernel/devmapper.py).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

CONTROL = "/dev/mapper/control"
_LIST_DEVICES, _DEV_STATUS, _TABLE_STATUS, _TARGET_MSG, _DEV_ARM_POLL = (
    0xC138FD00 | number for number in (2, 7, 12, 14, 16)
)
"""_IOWR(0xfd, number, struct dm_ioctl)."""
_IOCTL = struct.Struct("=3I3I4xII4xQ128s129s7x")
"""struct dm_ioctl: the version, the size of all data, where they start, the number of targets, the flags, the number of
events, the device's number, its name and its UUID."""
_NAME_SIZE = 128
"""Bytes of a name, with the zero at its end."""
_ABSENT = frozenset({errno.ENOENT, errno.ENODEV, errno.ENXIO})
"""Errors for want of device-mapper, or of a map."""
_LISTED = struct.Struct("=QI")
"""struct dm_name_list: the device's number, where the next one is. The name follows; at the next multiple of 8 the
number of events, and flags; and then, if the flags say so, the UUID (Linux 5.13 and later)."""
_TARGET = struct.Struct("=QQ4xI16s")
"""struct dm_target_spec: the first sector, how many, where the next one is, and the type. What it says follows."""
_SECTOR = struct.Struct("=Q")
"""struct dm_target_msg: a sector of the target that is told. The message follows."""
_TOO_SMALL, _NO_FLUSH, _WITH_UUIDS = 1 << 8, 1 << 11, 1 << 14
_HAS_UUID = 1
_FIRST_SIZE = 1 << 12
"""Bytes for an answer; more if they are too few."""


@dataclass(frozen=True)
class Known:
    """A map in the kernel: its minor number, the number of its events so far, and its UUID."""

    minor: int
    events: int
    uuid: str


def arm(control: int) -> None:
    """Let an open CONTROL be readable for poll(2) after the next event of any map. Raises OSError.

    Call this before maps are checked, so that no event is missed.
    """
    fcntl.ioctl(control, _DEV_ARM_POLL, _argument(_IOCTL.size))


def find(name: str) -> Known | None:
    """The map of this name, by one call whatever other maps there are. Raises OSError.

    Linux: drivers/md/dm-ioctl.c, dev_status.
    """
    wanted = os.fsencode(name)
    if len(wanted) >= _NAME_SIZE:
        return None
    argument = _argument(_IOCTL.size, name=wanted)
    try:
        _request(_DEV_STATUS, argument, name)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return None
    *_, happened, device, _, uuid = _IOCTL.unpack_from(argument)
    return Known(_minor(device), happened, _text(uuid))


def listing() -> dict[str, Known]:
    """All maps by their names. Raises OSError if the kernel does not answer."""
    try:
        data, start, _ = _ask(_LIST_DEVICES, _WITH_UUIDS)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return {}
    return dict(_listed(data, start)) if len(data) > start else {}


def status(name: str) -> str:
    """The status line of a map's first target: start, length, type, and what that type says. Raises OSError.

    Without a flush: that of a thin pool would wait for its disks.
    """
    data, start, targets = _ask(_TABLE_STATUS, _NO_FLUSH, name)
    if not targets:
        return ""
    first, sectors, _, kind = _TARGET.unpack_from(data, start)
    told_at = start + _TARGET.size
    words = first, sectors, _text(kind), _text(data[told_at:])
    return " ".join(map(str, words)).strip()


def send(name: str, text: str) -> None:
    """Give the first target of a map a message. Raises OSError, also while the map is suspended."""
    message = _SECTOR.pack(0) + os.fsencode(text) + b"\0"
    argument = _argument(_IOCTL.size + len(message), name=os.fsencode(name))
    argument[_IOCTL.size :] = message
    _request(_TARGET_MSG, argument, f"{name}: {text}")


def _ask(request: int, flags: int, name: str = "") -> tuple[bytes, int, int]:
    """The answer, where its data begin, and of how many targets they are. Raises OSError."""
    size = _FIRST_SIZE
    while True:
        argument = _argument(size, flags, name=os.fsencode(name))
        _request(request, argument, name)
        _, _, _, end, start, targets, answered, *_ = _IOCTL.unpack_from(argument)
        if not answered & _TOO_SMALL:
            return bytes(argument[:end]), start, targets
        size *= 2


def _request(request: int, argument: bytearray, about: str) -> None:
    """Raises OSError, also without device-mapper; the error says what the request is ``about``."""
    try:
        with open(CONTROL, "rb", buffering=0) as control:  # noqa: PTH123  (asked often: a Path costs more)
            fcntl.ioctl(control, request, argument)
    except OSError as error:
        raise OSError(error.errno, error.strerror, about) from error


def _listed(data: bytes, at: int) -> Iterator[tuple[str, Known]]:
    """The maps of a listing (Linux: drivers/md/dm-ioctl.c, list_devices)."""
    following = 1
    while following:
        device, following = _LISTED.unpack_from(data, at)
        name_ends = data.index(0, at + _LISTED.size)
        behind = (name_ends + 8) // 8 * 8
        happened, known = struct.unpack_from("=II", data, behind)
        uuid_at = behind + 8
        uuid = data[uuid_at : data.index(0, uuid_at)] if known & _HAS_UUID else b""
        yield os.fsdecode(data[at + _LISTED.size : name_ends]), Known(_minor(device), happened, _text(uuid))
        at += following


def _text(data: bytes) -> str:
    """Up to its zero, if it has one."""
    return data.partition(b"\0")[0].decode(errors="replace")


def _minor(device: int) -> int:
    """Linux: linux/kdev_t.h, huge_encode_dev."""
    return device & 0xFF | device >> 12 & 0xFFF00


def _argument(size: int, flags: int = 0, *, name: bytes = b"") -> bytearray:
    """An argument of so many bytes, with ``struct dm_ioctl`` at its beginning."""
    argument = bytearray(size)
    _IOCTL.pack_into(argument, 0, 4, 0, 0, size, _IOCTL.size, 0, flags, 0, 0, name, b"")
    return argument
