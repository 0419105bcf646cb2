"""What a qcow2 file says about itself in its header, read without a QEMU process.

The format is QEMU's docs/interop/qcow2.txt.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from drivers.errors import BadDisk

_MAGIC = b"QFI\xfb"
_FIXED = struct.Struct(">4sIQIIQ")
_L1_AT = 36
_L1 = struct.Struct(">IQ")
_ENTRY_BYTES = 8
_SNAPSHOTS_AT = 60
_SNAPSHOTS = struct.Struct(">I")
_FEATURES_AT = 72
_FEATURES = struct.Struct(">Q")
_DIRTY = 1
_CORRUPT = 2
_EXTERNAL_DATA = 4
_LONGEST_BACKING_NAME = 1023


@dataclass(frozen=True)
class Header:
    """``size``: of the disk, in bytes. ``dirty``: not closed cleanly. ``corrupt``: QEMU found it damaged.

    ``snapshots``: how many internal snapshots the file has.
    """

    size: int
    backing: str | None
    dirty: bool
    corrupt: bool
    external_data: bool
    snapshots: int


def read_header(path: Path) -> Header:
    """The header of a qcow2 file of version 3. Raises BadDisk, FileNotFoundError."""
    with path.open("rb") as file:
        head = file.read(_FEATURES_AT + _FEATURES.size)
        if len(head) < _FEATURES_AT + _FEATURES.size:
            raise BadDisk(f"{path} is too short for a qcow2 file")
        magic, version, backing_at, backing_length, _, size = _FIXED.unpack_from(head)
        if magic != _MAGIC or version != 3 or backing_length > _LONGEST_BACKING_NAME:
            raise BadDisk(f"{path} is not a qcow2 file of version 3")
        (features,) = _FEATURES.unpack_from(head, _FEATURES_AT)
        (snapshots,) = _SNAPSHOTS.unpack_from(head, _SNAPSHOTS_AT)
        file.seek(backing_at)
        backing = file.read(backing_length).decode(errors="replace") if backing_at else None
    return Header(
        size=size,
        backing=backing,
        dirty=bool(features & _DIRTY),
        corrupt=bool(features & _CORRUPT),
        external_data=bool(features & _EXTERNAL_DATA),
        snapshots=snapshots,
    )


def is_empty(path: Path) -> bool:
    """Whether a qcow2 file holds nothing that hides its backing, and no QEMU has written to it meanwhile.

    A first write to a part of the disk enters a table of that part at once into the one that is read here.
    """
    with path.open("rb") as file:
        file.seek(_L1_AT)
        entries, at = _L1.unpack(file.read(_L1.size))
        file.seek(at)
        return not any(file.read(entries * _ENTRY_BYTES))
