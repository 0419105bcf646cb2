"""Which volume of a pool of thin volumes belongs to which disk.

A volume is known by a number alone, and a state folder may be set back while its pool is not. So numbers are random: a
number in an old record is then in all likelihood nobody else's. A record says whether the disk's volume was made; only
what was made is used and deleted, and it is made once: what a pool has lost does not come back as an empty disk.

A snapshot is a volume that nobody writes, and that shares blocks with the disk's volume until the VM writes to them.
The kernel counts who needs a block, so a clone, whose volume begins as a copy of a snapshot, needs nothing of its
source. The number of a copy is in the record, as unused, before the copy is made; the number of a volume that is to be
deleted, until it is deleted. So a crash leaks no volume: the next call that changes the disk's volumes deletes it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from drivers.errors import BadDisk, CommandFailed, SnapshotMissing, VmDiskMissing
from drivers.snapshot.disks import Records

log = logging.getLogger(__name__)

NUMBERS = 1 << 24
"""How many there are (Linux: admin-guide/device-mapper/thin-provisioning; drivers/md/dm-thin.c, MAX_DEV_ID)."""

_TRIES = 16
_THERE, _MISSING = "File exists", "No data available"


@dataclass(frozen=True)
class Snapshot:
    """The record of a snapshot: the number of its volume, and the size of the disk at that time in bytes."""

    number: int
    size: int


@dataclass(frozen=True)
class ThinDisk:
    """The record of a disk. ``size`` in bytes. Until the volume is ``made``, ``number`` has no meaning.

    ``unused``: volumes that may be in the pool and are to be deleted.
    """

    number: int
    size: int
    origin: str
    made: bool
    snapshots: Mapping[str, Snapshot] = field(default_factory=dict)
    unused: tuple[int, ...] = ()

    @property
    def numbers(self) -> list[int]:
        """The numbers of all volumes of the disk that may be in the pool."""
        snapshots = [snapshot.number for snapshot in self.snapshots.values()]
        return [*snapshots, *[self.number] * self.made, *self.unused]


class Volumes:
    """The volumes of the VMs in ``records``. ``tell`` sends the pool a message.

    All calls raise BadDisk, CommandFailed, CommandTimedOut; those with a VM that has no disk, VmDiskMissing.
    """

    def __init__(
        self,
        records: Records[ThinDisk],
        tell: Callable[[str], None],
        draw: Callable[[], int] = lambda: secrets.randbelow(NUMBERS),
    ) -> None:
        self._records, self._tell, self._draw = records, tell, draw

    def is_made(self, vm: str) -> bool:
        return self._records.path(vm).exists() and self._records.read(vm).made

    def of(self, vm: str) -> ThinDisk:
        """The VM's disk. Raises VmDiskMissing also if its volume was not made."""
        disk = self._records.read(vm)
        if not disk.made:
            raise VmDiskMissing(vm)
        return disk

    def make(self, vm: str) -> ThinDisk:
        """Make a new, empty volume for a VM that has a record."""
        for number in self._untaken():
            if self._create(number, f"create_thin {number}"):
                return self._write(vm, replace(self._records.read(vm), number=number, made=True))
        raise _none_free(vm)

    def take(self, vm: str, snapshot: str, still: Callable[[], AbstractContextManager[None]]) -> None:
        """Keep what the VM's volume holds as a snapshot, unless it has one of this name.

        ``still``: within it nobody writes to the volume.
        """
        if snapshot in self.of(vm).snapshots:
            return
        disk = self._delete_unused(vm)
        number = self._copy(vm, disk, disk.number, still)
        self._write(vm, replace(disk, snapshots={**disk.snapshots, snapshot: Snapshot(number, disk.size)}))

    def kept(self, vm: str, snapshot: str) -> Snapshot:
        """A snapshot. Raises SnapshotMissing."""
        snapshots = self.of(vm).snapshots
        if snapshot not in snapshots:
            raise SnapshotMissing(vm, snapshot)
        return snapshots[snapshot]

    def revert(self, vm: str, snapshot: str) -> None:
        """Replace the VM's volume, which nobody may use, by a copy of the snapshot. Raises SnapshotMissing."""
        kept = self.kept(vm, snapshot)
        disk = self._delete_unused(vm)
        number = self._copy_snapshot(vm, disk, kept)
        self._write(vm, replace(disk, number=number, size=kept.size, unused=(disk.number,)))
        self._delete_unused(vm)

    def clone(self, vm: str, snapshot: str, new: str) -> None:
        """Give another VM, which has no record, a copy of the snapshot. Raises SnapshotMissing."""
        kept = self.kept(vm, snapshot)
        disk = self._write(new, ThinDisk(0, kept.size, self.of(vm).origin, made=False))
        number = self._copy_snapshot(new, disk, kept)
        self._write(new, replace(disk, number=number, made=True))

    def drop(self, vm: str, snapshot: str) -> None:
        """Delete the volume of a snapshot, if there is one."""
        disk = self.of(vm)
        snapshots = dict(disk.snapshots)
        if dropped := snapshots.pop(snapshot, None):
            self._write(vm, replace(disk, snapshots=snapshots, unused=(*disk.unused, dropped.number)))
        self._delete_unused(vm)

    def delete(self, disk: ThinDisk) -> None:
        """Delete the volumes of a disk and its snapshots, if they are there."""
        for number in disk.numbers:
            self._delete(number)

    def _delete_unused(self, vm: str) -> ThinDisk:
        """Delete the unused volumes. Returns the disk without them."""
        disk = self.of(vm)
        for number in disk.unused:
            self._delete(number)
        return self._write(vm, replace(disk, unused=())) if disk.unused else disk

    def _copy_snapshot(self, vm: str, disk: ThinDisk, snapshot: Snapshot) -> int:
        try:
            return self._copy(vm, disk, snapshot.number)
        except CommandFailed as error:
            raise volume_gone(vm, snapshot, error) from error

    def _copy(
        self,
        vm: str,
        disk: ThinDisk,
        number: int,
        still: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> int:
        """Make a copy of a volume, which the record of the disk has as unused from then on. Returns its number."""
        for new in self._untaken():
            self._write(vm, replace(disk, unused=(new,)))
            with still():
                created = self._create(new, f"create_snap {new} {number}")
            if created:
                return new
            self._write(vm, disk)  # the volume is not ours to delete
        raise _none_free(vm)

    def _untaken(self) -> Iterator[int]:
        """Some numbers that no record has."""
        taken = {number for disk in self._records.all().values() for number in disk.numbers}
        for _ in range(_TRIES):
            number = self._draw()
            if number not in taken:
                yield number

    def _write(self, vm: str, disk: ThinDisk) -> ThinDisk:
        self._records.write(vm, disk)
        return disk

    def _delete(self, number: int) -> None:
        try:
            self._tell(f"delete {number}")
        except CommandFailed as error:
            if _MISSING not in error.stderr:
                raise

    def _create(self, number: int, order: str) -> bool:
        """Whether the pool made the volume; it had none of this number then."""
        try:
            self._tell(order)
        except CommandFailed as error:
            if _THERE not in error.stderr:
                raise
            log.warning("the disks' pool has a volume %d that is in no record; another number is taken", number)
            return False
        return True


def _none_free(vm: str) -> BadDisk:
    return BadDisk(f"VM {vm}: the disks' pool has volumes of all {_TRIES} numbers that were tried")


def volume_gone(vm: str, disk: ThinDisk | Snapshot, error: CommandFailed) -> CommandFailed | BadDisk:
    """What to raise when the map, or a copy, of a volume cannot be made."""
    if _MISSING not in error.stderr:
        return error
    return BadDisk(f"VM {vm}: its volume {disk.number} is gone from the disks' pool, and with it the disk's data")
