"""What the drivers of kernel disks for VMs share: names, records, and the order in which a disk is made."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from drivers.base import Device, Place
from drivers.errors import BadDevice, BadDisk, DiskInUse, VmDiskMissing
from drivers.host.durable import sync, write_atomically
from drivers.host.folders import matching
from drivers.kernel import devmapper, ownership
from drivers.names import checked
from drivers.snapshot.ranges import require_size

log = logging.getLogger(__name__)

D = TypeVar("D")

DISK_PREFIX = "virtman-vm-"


class Records(Generic[D]):
    """One JSON file for each VM's disk in ``folder``, with the fields of the dataclass ``kind``.

    All calls with a name raise BadName.
    """

    def __init__(self, folder: Path, kind: type[D]) -> None:
        self._folder, self._type = folder, TypeAdapter(kind)
        for torn in folder.glob(".*"):
            torn.unlink()

    def path(self, vm: str) -> Path:
        return self._folder / f"{checked(vm)}.json"

    def read(self, vm: str) -> D:
        """Raises VmDiskMissing, BadDisk if the record is damaged."""
        path = self.path(vm)
        try:
            return self._type.validate_json(path.read_bytes())
        except FileNotFoundError:
            raise VmDiskMissing(vm) from None
        except ValidationError as error:
            raise BadDisk(f"the record of VM {vm} is damaged: {path}: {error.errors()[0]['msg']}") from error

    def all(self) -> dict[str, D]:
        """The disks by VM. Raises BadDisk."""
        return {path.stem: self.read(path.stem) for path in matching(self._folder, "[!.]*.json")}

    def write(self, vm: str, disk: D) -> None:
        """Write a record; a power cut leaves the old one or the new one."""
        write_atomically(self.path(vm), self._type.dump_json(disk))


class MapDisks(ABC, Generic[D]):
    """Disks of VMs as ``/dev/mapper/virtman-vm-<vm>``, with records in ``folder``.

    What is missing of a disk that was made is made again, but not what holds its data: that is BadDisk. All calls
    raise what VmDiskDriver says, and NotOurs, CommandFailed.
    """

    moves_live = False

    def __init__(self, place: Place, folder: str, kind: type[D]) -> None:
        ownership.claim(place.state)
        self._group = place.group
        self._folder = place.state / folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._records = Records(self._folder, kind)
        self._lock = threading.Lock()

    def create(self, vm: str, origin: Device, size: int) -> Device:
        """``origin``: a kernel device whose path is the same after a reboot; else BadDevice is raised."""
        path = checked_origin(vm, origin, size)
        with self._lock:
            if not self._is_made(vm):
                self._make(vm, path, origin.size, size)
            return self._activate(vm)

    def open(self, vm: str) -> Device:
        """The disk is made usable if the host was down."""
        with self._lock:
            return self._activate(vm)

    def delete(self, vm: str) -> None:
        """The disk may be half made. Raises DiskInUse or CommandFailed if somebody uses the disk or a snapshot."""
        checked(vm)
        with self._lock:
            self._remove(vm)

    def rename(self, vm: str, new: str) -> Device:
        """The map is made anew under the other name."""
        for name in (vm, new):
            checked(name)
        with self._lock:
            old, renamed = self._records.path(vm), self._records.path(new)
            if old.exists() or not renamed.exists():
                self._records.read(vm)
                if renamed.exists():
                    raise BadDisk(f"VM {new} has a disk, and the one of VM {vm} cannot get its name")
                if is_open(vm):
                    raise DiskInUse(vm)
                self._release(vm, new)
                old.rename(renamed)
                sync(old.parent)
            return self._activate(new)

    @abstractmethod
    def _release(self, vm: str, new: str) -> None:
        """Remove the maps of a disk that nobody has open, and rename what is named after the VM, but the record."""

    def _is_made(self, vm: str) -> bool:
        """Whether ``_make`` was done with the VM's disk."""
        return self._records.path(vm).exists()

    @abstractmethod
    def _make(self, vm: str, origin: Path, origin_size: int, size: int) -> None:
        """Make a disk and its record. Remains of an earlier creation or deletion may be there."""

    @abstractmethod
    def _activate(self, vm: str) -> Device:
        """Make the map of a disk that has a record, unless it is there."""

    @abstractmethod
    def _remove(self, vm: str) -> None:
        """Remove the map, what the disk is made of, and the record."""


def is_open(vm: str) -> bool:
    """Whether anybody has the disk open."""
    name = DISK_PREFIX + vm
    resume_if_suspended(name)  # a program that waits for its writes cannot close the disk either
    return devmapper.exists(name) and devmapper.openers(name) > 0


def resume_if_suspended(name: str) -> None:
    """Resume a map that an agent suspended and did not resume before it ended."""
    if devmapper.is_suspended(name):
        log.warning("the map %s was suspended, and is resumed", name)
        devmapper.resume(name)


def checked_origin(vm: str, origin: Device, size: int) -> Path:
    """The path of a kernel device over which a disk of ``size`` bytes can be made. Raises BadDevice, BadDisk."""
    if origin.path is None:
        raise BadDevice(f"VM {vm}: the origin is no kernel device")
    require_size(vm, origin.size, size)
    return origin.path


def found(files: Iterable[Path]) -> frozenset[str]:
    """VMs with one of these files or with a map."""
    maps = (name.removeprefix(DISK_PREFIX) for name in devmapper.names(DISK_PREFIX))
    return frozenset((*(path.name.partition(".")[0] for path in files), *maps))
