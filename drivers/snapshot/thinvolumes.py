"""Which volume of a pool of thin volumes is whose.

A volume is known by a number alone, and a state folder may be set back while its pool is not. So a number is drawn by
lot: one that an old record names is then in all likelihood nobody else's. A record says whether the volume was made;
only what was made is used and deleted, and it is made once: what a pool has lost does not come back as an empty disk.

A snapshot is a volume too, which shares with the disk's what neither has written since, and which nobody writes. Its
number is written down before the volume is made and until it is deleted, as not made: so a crash leaks none. What is
not made is deleted by the next call that changes the disk's volumes. A clone's volume begins as a copy of the volume of
another disk's snapshot; the kernel counts who needs a block, so neither needs the other.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from drivers.errors import BadDisk, CommandFailed, SnapshotMissing, VmDiskMissing
from drivers.snapshot.disks import Records

log = logging.getLogger(__name__)

NUMBERS = 1 << 24
"""How many there are (Linux: admin-guide/device-mapper/thin-provisioning; drivers/md/dm-thin.c, MAX_DEV_ID)."""

_TRIES = 16
_THERE, _MISSING = "File exists", "No data available"
_SUPERBLOCK = 4096
"""Bytes of the first block of metadata: the kernel takes zeros there for new metadata."""


@dataclass(frozen=True)
class Snapshot:
    """What is written down of a snapshot: its volume, and how large the disk was. ``made``: the volume is there,
    whole."""

    number: int
    size: int
    made: bool


@dataclass(frozen=True)
class ThinDisk:
    """What is written down of a disk. ``size`` in bytes. Until the volume is ``made``, ``number`` is nobody's.

    ``spare``: a volume that is about to be the disk's, ``made`` or not, or that was, and is in nobody's use.
    """

    number: int
    size: int
    origin: str
    made: bool
    snapshots: Mapping[str, Snapshot] = field(default_factory=dict)
    spare: int | None = None

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError if what was read as snapshots are none."""
        snapshots = {
            name: snapshot if isinstance(snapshot, Snapshot) else Snapshot(**snapshot)
            for name, snapshot in dict(self.snapshots).items()
        }
        object.__setattr__(self, "snapshots", snapshots)

    @property
    def numbers(self) -> list[int]:
        """Those of all its volumes that may be there."""
        snapshots = [snapshot.number for snapshot in self.snapshots.values()]
        return snapshots + [self.number] * self.made + ([] if self.spare is None else [self.spare])


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
        """The VM's disk. Raises VmDiskMissing if it has none or its volume was not made, BadDisk, BadName."""
        disk = self._records.read(vm)
        if not disk.made:
            raise VmDiskMissing(vm)
        return disk

    def make(self, vm: str) -> ThinDisk:
        """A new, empty volume for a VM that has a record. Raises BadDisk, CommandFailed, CommandTimedOut."""
        for number in self._untaken():
            if self._made(number, f"create_thin {number}"):
                return self._write(vm, replace(self._records.read(vm), number=number, made=True))
        raise _none_free(vm)

    def snapshots(self, vm: str) -> dict[str, Snapshot]:
        """The snapshots of the VM's disk. Raises as ``of``."""
        return {name: snapshot for name, snapshot in self.of(vm).snapshots.items() if snapshot.made}

    def take(self, vm: str, snapshot: str, still: Callable[[], AbstractContextManager[None]]) -> None:
        """Keep what the VM's volume holds as a snapshot, unless it has one of this name.

        ``still``: within it nobody writes to the volume. Raises as ``of``, CommandFailed, CommandTimedOut.
        """
        if snapshot in self.snapshots(vm):
            return
        disk = self._tidy(vm)

        def noted(number: int, *, made: bool = False) -> ThinDisk:
            return replace(disk, snapshots={**disk.snapshots, snapshot: Snapshot(number, disk.size, made)})

        self._write(vm, noted(self._copy(vm, disk.number, noted, still), made=True))

    def kept(self, vm: str, snapshot: str) -> Snapshot:
        """A snapshot. Raises SnapshotMissing, and as ``of``."""
        snapshots = self.snapshots(vm)
        if snapshot not in snapshots:
            raise SnapshotMissing(vm, snapshot)
        return snapshots[snapshot]

    def revert(self, vm: str, snapshot: str) -> None:
        """Let the VM have a new volume that holds what the snapshot does, for the one that it has, which nobody may
        use.

        Raises SnapshotMissing, BadDisk if the snapshot's volume is gone, CommandFailed, CommandTimedOut, and as ``of``.
        """
        kept = self.kept(vm, snapshot)
        disk = self._tidy(vm)
        number = self._copy_snapshot(vm, kept, disk)
        self._write(vm, replace(disk, number=number, size=kept.size, spare=disk.number))
        self._tidy(vm)

    def clone(self, vm: str, snapshot: str, new: str) -> None:
        """Let another VM, of which nothing is written down, have a volume that holds what the snapshot does.

        Raises as ``revert``.
        """
        kept = self.kept(vm, snapshot)
        disk = self._write(new, ThinDisk(0, kept.size, self.of(vm).origin, made=False))
        number = self._copy_snapshot(new, kept, disk)
        self._write(new, replace(disk, number=number, made=True))

    def drop(self, vm: str, snapshot: str) -> None:
        """Delete the volume of a snapshot, if there is one. Raises as ``of``, CommandFailed, CommandTimedOut."""
        disk = self.of(vm)
        if snapshot in disk.snapshots:
            self._write(
                vm, replace(disk, snapshots={**disk.snapshots, snapshot: replace(disk.snapshots[snapshot], made=False)})
            )
        self._tidy(vm)

    def delete(self, disk: ThinDisk) -> None:
        """Delete the volumes of a disk and its snapshots, if they are there. Raises CommandFailed, CommandTimedOut."""
        for number in disk.numbers:
            self._delete(number)

    def _tidy(self, vm: str) -> ThinDisk:
        """Delete what was not made whole, or not deleted to the end."""
        disk = self.of(vm)
        whole = replace(
            disk, snapshots={name: snapshot for name, snapshot in disk.snapshots.items() if snapshot.made}, spare=None
        )
        if whole == disk:
            return disk
        for number in set(disk.numbers) - set(whole.numbers):
            self._delete(number)
        return self._write(vm, whole)

    def _copy_snapshot(self, vm: str, snapshot: Snapshot, disk: ThinDisk) -> int:
        """A new volume with what a snapshot keeps, which is noted as the disk's spare one. Returns its number."""
        try:
            return self._copy(vm, snapshot.number, lambda number: replace(disk, spare=number))
        except CommandFailed as error:
            raise volume_gone(vm, snapshot, error) from error

    def _copy(
        self,
        vm: str,
        number: int,
        noted: Callable[[int], ThinDisk],
        still: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> int:
        """A new volume with what another one holds, which is ``noted`` before. Returns its number."""
        before = self._records.read(vm)
        for new in self._untaken():
            self._write(vm, noted(new))
            with still():
                made = self._made(new, f"create_snap {new} {number}")
            if made:
                return new
            self._write(vm, before)  # the volume is not ours to delete
        raise _none_free(vm)

    def _untaken(self) -> Iterator[int]:
        """Some numbers that no disk has. Raises BadDisk."""
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

    def _made(self, number: int, order: str) -> bool:
        try:
            self._tell(order)
        except CommandFailed as error:
            if _THERE not in error.stderr:
                raise
            log.warning("the disks' pool has a volume %d that is written down of no VM; another is made", number)
            return False
        return True


def _none_free(vm: str) -> BadDisk:
    return BadDisk(f"VM {vm}: the disks' pool has volumes of all {_TRIES} numbers that were tried")


def volume_gone(vm: str, disk: ThinDisk | Snapshot, error: CommandFailed) -> CommandFailed | BadDisk:
    """What to raise when the map, or a copy, of a volume cannot be made."""
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
