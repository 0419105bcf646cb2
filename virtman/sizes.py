"""Which sizes VMs' disks may have."""

from __future__ import annotations

from virtman.errors import BadSize
from volt.text import exact_size

SECTOR = 512
LARGEST_DISK = 128 << 40
"""Bytes. QEMU opens no qcow2 whose first table has more than 32 MiB (block/qcow2.h, QCOW_MAX_L1_SIZE). Above a
snapshot, and in a clone, a disk has clusters of 16 KiB (drivers/snapshot/qcow2.py)."""


def check_size(size: int | None) -> None:
    """Raises BadSize for a size in bytes that no disk can have."""
    if size is not None and (size <= 0 or size % SECTOR or size > LARGEST_DISK):
        raise BadSize(
            f"a disk of {exact_size(size)} is not possible: the size is a positive multiple of {SECTOR} bytes, at most"
            f" {exact_size(LARGEST_DISK)}"
        )
