"""What a qcow2 file says about itself in its header, read without a QEMU process.

The format is QEMU's docs/interop/qcow2.txt.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from drivers.errors import BadDisk

_MAGIC = b"QFI\xfb"
_FIXED = struct.Struct(">4sIQI4xQ4xIQ12xI8xQ")
"""Magic, version; offset and length of the backing's name; bytes of the disk; entries and offset of the L1 table;
number of internal snapshots; incompatible features."""
_L1_ENTRY_BYTES = 8
_DIRTY, _CORRUPT, _EXTERNAL_DATA = 1, 2, 4
_LONGEST_BACKING_NAME = 1023


@dataclass(frozen=True)
class Header:
    """``size``: of the disk, in bytes. ``dirty``: not closed cleanly. ``corrupt``: QEMU found it damaged.

    ``snapshots``: how many internal snapshots the file has. ``l1_at``, ``l1_size``: of its first table, in bytes.
    """

    size: int
    backing: str | None
    dirty: bool
    corrupt: bool
    external_data: bool
    snapshots: int
    l1_at: int
    l1_size: int


def read_header(path: Path) -> Header:
    """The header of a qcow2 file of version 3. Raises BadDisk, FileNotFoundError."""
    with path.open("rb") as file:
        head = file.read(_FIXED.size)
        if len(head) < _FIXED.size:
            raise BadDisk(f"{path} is too short for a qcow2 file")
        magic, version, backing_at, backing_length, size, entries, l1_at, snapshots, features = _FIXED.unpack(head)
        if magic != _MAGIC or version != 3 or backing_length > _LONGEST_BACKING_NAME:
            raise BadDisk(f"{path} is not a qcow2 file of version 3")
        file.seek(backing_at)
        backing = file.read(backing_length).decode(errors="replace") if backing_at else None
    return Header(
        size=size,
        backing=backing,
        dirty=bool(features & _DIRTY),
        corrupt=bool(features & _CORRUPT),
        external_data=bool(features & _EXTERNAL_DATA),
        snapshots=snapshots,
        l1_at=l1_at,
        l1_size=entries * _L1_ENTRY_BYTES,
    )


def is_empty(path: Path) -> bool:
    """Whether a qcow2 file holds nothing that hides its backing.

    A first write to a part of the disk enters a table of that part at once into the L1 table, which is read here.
    Raises BadDisk, FileNotFoundError.
    """
    header = read_header(path)
    with path.open("rb") as file:
        file.seek(header.l1_at)
        return not any(file.read(header.l1_size))
