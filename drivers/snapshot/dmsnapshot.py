"""A VM's private disk: a device-mapper snapshot of the image's device on this host, with a store of its own in a file.

The kernel drops a snapshot whose store is full, with all that the VM wrote. So the store takes the disk space for every
chunk of the disk, written or not, before the disk is made: it cannot get full, and a VM's write never meets a full file
system. That is what a disk costs here; thin volumes (dmthin) share their space instead.
(Linux: admin-guide/device-mapper/snapshot, and drivers/md/dm-snap-persistent.c for the format of a store.)

The kernel also drops a snapshot when it cannot read the image to copy a chunk. The device below must wait for the image
rather than fail; when it does fail, ``open`` after the maps are gone brings back what the VM wrote: the store has it.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from drivers.base import Device, Monitor, Place, Range
from drivers.door import door
from drivers.errors import BadDisk, DriverError, NotPossible, SnapshotMissing
from drivers.host.durable import sync
from drivers.host.folders import matching
from drivers.host.space import allocate
from drivers.kernel import devmapper, loopdev
from drivers.kernel.devmapper import SECTOR
from drivers.names import checked
from drivers.needs import DEVICE_MAPPER, DMSETUP, LOOP, LOSETUP, MODPROBE, UDEVADM, Needs
from drivers.snapshot.disks import DISK_PREFIX, MapDisks, found
from drivers.snapshot.ranges import require_size

log = logging.getLogger(__name__)

BASE_PREFIX = "virtman-vmbase-"

CHUNK = 64 << 10
"""Bytes that a first write copies from the image, unless it covers them all. The kernel keeps up to 32 bytes of memory
for each chunk that was written."""

_EXCEPTION = 16
"""Bytes that a store's table has for a chunk (struct disk_exception)."""
_HEADER = struct.Struct("<4I")
"""Magic, valid, version, sectors of a chunk (struct disk_header)."""
_MAGIC = 0x70416E53


@dataclass(frozen=True)
class _Disk:
    """The record of a disk, made once its store is complete. Sizes in bytes."""

    size: int
    origin: str
    origin_size: int
    chunk: int


@door
class DmSnapshotDisks(MapDisks[_Disk]):
    """Disks of VMs as ``/dev/mapper/virtman-vm-<vm>``, their stores in ``<state>/dmsnapshot``. ``chunk``: see CHUNK.

    Calls that only disks with snapshots can do raise NotPossible, after VmDiskMissing and BadName.
    """

    needs = Needs(
        tools=(DMSETUP, LOSETUP, MODPROBE, UDEVADM),
        modules=("dm_snapshot", "dm_zero"),
        nodes=(DEVICE_MAPPER, LOOP),
        root=True,
    )

    def __init__(self, place: Place, *, chunk: int = CHUNK) -> None:
        super().__init__(place, "dmsnapshot", _Disk)
        self._chunk = chunk

    def resize(self, vm: str, size: int, monitor: Monitor | None) -> Device:  # noqa: ARG002
        """Only to the size that the disk has."""
        before = self._records.read(vm).size
        require_size(vm, before, size)
        if size != before:
            raise self._not_possible(vm, "given another size")
        return self.open(vm)

    def take(self, vm: str, snapshot: str, monitor: Monitor | None) -> Device:  # noqa: ARG002
        raise self._not_possible(vm, f"kept as it is now, as {checked(snapshot)}")

    def revert(self, vm: str, snapshot: str) -> Device:
        raise self._not_possible(vm, f"set back to {checked(snapshot)}")

    def drop(self, vm: str, snapshot: str, monitor: Monitor | None) -> None:  # noqa: ARG002
        self._records.read(vm)
        checked(snapshot)

    def snapshots(self, vm: str) -> frozenset[str]:
        self._records.read(vm)
        return frozenset()

    def clone(self, vm: str, snapshot: str, new: str) -> Device:
        for name in (vm, snapshot, new):
            checked(name)
        raise self._not_possible(vm, "cloned")

    @contextmanager
    def reading(self, vm: str, snapshot: str) -> Iterator[Device]:
        checked(snapshot)
        self._records.read(vm)
        raise SnapshotMissing(vm, snapshot)
        yield  # what makes it a generator

    def changes(self, vm: str, snapshot: str | None, since: str | None) -> list[Range]:  # noqa: ARG002
        raise self._not_possible(vm, "sent")

    def existing(self) -> frozenset[str]:
        """VMs with a disk, whole or half made."""
        return found(matching(self._folder, "[!.]*"))

    def spare(self) -> int:
        """No limit: the disks have taken all their space."""
        return sys.maxsize

    def trouble(self) -> str:
        """None: the disks have taken all their space."""
        return ""

    def _not_possible(self, vm: str, what: str) -> NotPossible:
        """The error to raise. Raises VmDiskMissing, BadName."""
        self._records.read(vm)
        return NotPossible(f"VM {vm}: a disk of the driver dmsnapshot cannot be {what}; disks of the driver dmthin can")

    def _store(self, vm: str) -> Path:
        return self._folder / f"{checked(vm)}.store"

    def _make(self, vm: str, origin: Path, origin_size: int, size: int) -> None:
        self._remove(vm)  # remains of an interrupted creation or deletion may hold old data
        try:
            allocate(self._store(vm), store_size(size, self._chunk))
            sync(self._store(vm))
            sync(self._folder)
            self._records.write(vm, _Disk(size, str(origin), origin_size, self._chunk))
        except (DriverError, OSError):
            self._remove(vm)
            raise

    def _activate(self, vm: str) -> Device:
        disk, name, store = self._records.read(vm), DISK_PREFIX + vm, self._store(vm)
        if not devmapper.exists(name):
            if not store.exists():
                raise BadDisk(f"VM {vm}: the store of its disk is lost: {store}")
            _revalidate(store)
            loop = loopdev.attach(store)
            base = devmapper.create(BASE_PREFIX + vm, _base_table(disk), read_only=True)
            table = f"0 {disk.size // SECTOR} snapshot {base} {loop} P {disk.chunk // SECTOR}"
            devmapper.create(name, [table], group=self._group)
        elif not loopdev.is_over(devmapper.numbers_in(devmapper.table(name))[1], self._store(vm)):
            raise BadDisk(
                f"VM {vm}: its disk runs over another file than {self._store(vm)}: that folder was moved or set back"
                " while the disk was open; bring it back as it was, or stop the VM and reboot"
            )
        return Device(size=disk.size, path=devmapper.map_path(name))

    def _release(self, vm: str, new: str) -> None:
        self._remove_maps(vm)
        if self._store(vm).exists():
            self._store(vm).rename(self._store(new))

    def _remove_maps(self, vm: str) -> None:
        devmapper.remove(DISK_PREFIX + vm)
        devmapper.remove(BASE_PREFIX + vm)
        loopdev.detach(self._store(vm))

    def _remove(self, vm: str) -> None:
        self._remove_maps(vm)
        # The record first: a disk that has one is whole.
        for file in (self._records.path(vm), self._store(vm)):
            file.unlink(missing_ok=True)


def store_size(size: int, chunk: int) -> int:
    """Bytes of a store in which every chunk of a disk of ``size`` bytes has room.

    A header, and then areas of one chunk of table and as many chunks of data as the table has places. When an area is
    full, the kernel writes the table of the next at once, also if nothing comes after it.
    """
    data = -(-size // chunk)
    tables = data // (chunk // _EXCEPTION) + 1
    return (1 + tables + data) * chunk


def _base_table(disk: _Disk) -> list[str]:
    """What the disk reads where the VM did not write: the image and, if the disk is larger, zeros."""
    image, end = disk.origin_size // SECTOR, disk.size // SECTOR
    lines = [f"0 {image} linear {disk.origin} 0"]
    return lines if image == end else [*lines, f"{image} {end - image} zero"]


def _revalidate(store: Path) -> None:
    """Have the kernel take a store again that it gave up after an error: the table in the store is right."""
    with store.open("r+b") as file:
        magic, valid, *rest = _HEADER.unpack(file.read(_HEADER.size))
        if magic == _MAGIC and not valid:
            log.warning("the kernel gave up the snapshot with the store %s after an error; it is used again", store)
            file.seek(0)
            file.write(_HEADER.pack(magic, 1, *rest))
            file.flush()
            os.fsync(file.fileno())
