"""What the drivers of kernel disks for VMs have in common: names and records."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from drivers import devmapper
from drivers.base import Device, Existing
from drivers.devmapper import SECTOR
from drivers.durable import write_atomically
from drivers.errors import BadDevice, BadDisk, SnapshotMissing
from drivers.names import checked

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")

DISK_PREFIX = "virtman-vm-"


class Records(Generic[D]):
    """One JSON file for each VM's disk in ``folder``, with the fields of the dataclass ``kind``."""

    def __init__(self, folder: Path, kind: type[D]) -> None:
        self._folder, self._kind = folder, kind
        for torn in folder.glob(".*"):
            torn.unlink()

    def path(self, vm: str) -> Path:
        """Where the disk is written down. Raises BadName."""
        return self._folder / f"{checked(vm)}.json"

    def read(self, vm: str) -> D:
        """Raises SnapshotMissing, BadDisk if the record is damaged, BadName."""
        path = self.path(vm)
        try:
            return self._kind(**json.loads(path.read_text()))
        except FileNotFoundError:
            raise SnapshotMissing(vm) from None
        except (ValueError, TypeError) as error:
            raise BadDisk(f"the record of VM {vm} is damaged: {path}: {error}") from error

    def all(self) -> dict[str, D]:
        """The disks by VM. Raises BadDisk."""
        return {path.stem: self.read(path.stem) for path in self._folder.glob("*.json")}

    def write(self, vm: str, disk: D) -> None:
        """Write a disk down, so that a power cut leaves the old record or the new one."""
        write_atomically(self.path(vm), json.dumps(asdict(disk)).encode())


def checked_origin(vm: str, origin: Device, size: int) -> Path:
    """The origin's kernel device, if a disk of ``size`` bytes can be made over it. Raises BadDevice, BadDisk."""
    if origin.path is None:
        raise BadDevice(f"VM {vm}: the origin is no kernel device")
    if size < origin.size or size % SECTOR or origin.size % SECTOR:
        raise BadDisk(f"VM {vm}: {size} is not a disk size: a multiple of {SECTOR}, and at least {origin.size}")
    return origin.path


def found(files: Iterable[Path], what: str) -> Existing:
    """VMs with one of these files or with a map."""
    details = {path.name.partition(".")[0]: what for path in files}
    maps = (name.removeprefix(DISK_PREFIX) for name in devmapper.names(DISK_PREFIX))
    return Existing(frozenset(details | {name: "a map without a record" for name in maps if name not in details}))
