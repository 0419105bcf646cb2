"""Which volume of a pool of thin volumes is whose.

A volume is known by a number alone, and a state folder may be set back while its pool is not. So a number is drawn by
lot: one that an old record names is then in all likelihood nobody else's. A record says whether the volume was made;
only what was made is used and deleted, and it is made once: what a pool has lost does not come back as an empty disk.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from drivers.errors import BadDisk, CommandFailed, SnapshotMissing
from drivers.snapshot.disks import Records

log = logging.getLogger(__name__)

NUMBERS = 1 << 24
"""How many there are (Linux: admin-guide/device-mapper/thin-provisioning; drivers/md/dm-thin.c, MAX_DEV_ID)."""

_TRIES = 16
_THERE, _MISSING = "File exists", "No data available"
_SUPERBLOCK = 4096
"""Bytes of the first block of metadata: the kernel takes zeros there for new metadata."""


@dataclass(frozen=True)
class ThinDisk:
    """What is written down of a disk. ``size`` in bytes. Until the volume is ``made``, ``number`` is nobody's.

    The release before wrote no ``made``.
    """

    number: int
    size: int
    origin: str
    made: bool = True


class Volumes:
    """The volumes of the VMs in ``records``. ``tell`` sends the pool a message, and raises CommandFailed."""

    def __init__(
        self,
        records: Records[ThinDisk],
        tell: Callable[[str], None],
        draw: Callable[[], int] = lambda: secrets.randbelow(NUMBERS),
    ) -> None:
        self._records, self._tell, self._draw = records, tell, draw

    def is_made(self, vm: str) -> bool:
        """Whether the VM has a volume. Raises BadDisk, BadName."""
        return self._records.path(vm).exists() and self._records.read(vm).made

    def of(self, vm: str) -> ThinDisk:
        """The VM's disk. Raises SnapshotMissing if it has none or its volume was not made, BadDisk, BadName."""
        disk = self._records.read(vm)
        if not disk.made:
            raise SnapshotMissing(vm)
        return disk

    def make(self, vm: str) -> ThinDisk:
        """A new, empty volume for a VM that has a record. Raises BadDisk, CommandFailed, CommandTimedOut."""
        taken = {disk.number for disk in self._records.all().values() if disk.made}
        for _ in range(_TRIES):
            number = self._draw()
            if number not in taken and self._made(number):
                disk = replace(self._records.read(vm), number=number, made=True)
                self._records.write(vm, disk)
                return disk
        raise BadDisk(f"VM {vm}: the disks' pool has volumes of all {_TRIES} numbers that were tried")

    def delete(self, disk: ThinDisk) -> None:
        """Delete the volume, if it was made and is there. Raises CommandFailed, CommandTimedOut."""
        if not disk.made:
            return
        try:
            self._tell(f"delete {disk.number}")
        except CommandFailed as error:
            if _MISSING not in error.stderr:
                raise

    def _made(self, number: int) -> bool:
        try:
            self._tell(f"create_thin {number}")
        except CommandFailed as error:
            if _THERE not in error.stderr:
                raise
            log.warning("the disks' pool has a volume %d that is written down of no VM; another is made", number)
            return False
        return True


def volume_gone(vm: str, disk: ThinDisk, error: CommandFailed) -> CommandFailed | BadDisk:
    """What to raise when the map of a volume cannot be made."""
    if _MISSING not in error.stderr:
        return error
    return BadDisk(f"VM {vm}: its volume {disk.number} is gone from the disks' pool, and with it the disk's data")


def is_new(meta: Path) -> bool:
    """Whether no pool has ever had these metadata. Raises OSError."""
    if not meta.exists():
        return True
    with meta.open("rb") as file:
        return not any(file.read(_SUPERBLOCK))


def is_lost(folder: Path) -> bool:
    """Whether files of a pool that was used are missing or blank. Raises OSError."""
    data = folder / "data"
    return is_new(folder / "meta") or not data.exists() or not data.stat().st_size
