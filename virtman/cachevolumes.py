"""The volumes of this host's cache, as people add and remove them."""

from __future__ import annotations

from pathlib import Path

from drivers.base import CacheGroup
from drivers.cachemodels import Volume
from virtman.devices import Devices
from virtman.errors import NotFound, NoVolumes
from virtman.upkeep import Upkeep


class CacheVolumes:
    """``group``: the cache driver if it has volumes; ``without``: why it has none."""

    def __init__(self, group: CacheGroup | None, without: str, devices: Devices, upkeep: Upkeep) -> None:
        self._maybe, self._without = group, without
        self._devices, self._upkeep = devices, upkeep

    def require(self) -> CacheGroup:
        """The cache driver. Raises NoVolumes."""
        if self._maybe is None:
            raise NoVolumes(self._without)
        return self._maybe

    def all(self) -> list[Volume]:
        """The volumes of the cache. Raises NoVolumes, DriverError."""
        return self.views(self.require().volumes())

    def known(self) -> list[Volume]:
        """The volumes of the cache; none if the driver has none. Raises DriverError."""
        return [] if self._maybe is None else self.all()

    def views(self, found: list[Volume]) -> list[Volume]:
        """What is told of volumes."""
        devices = {record.name: record.device for record in self._devices.records.all()}
        return [
            volume.model_copy(update={"devices": [devices[name] for name in volume.devices if name in devices]})
            for volume in found
        ]

    def add(self, path: Path) -> Volume:
        """Let the cache use a disk, a partition, or a file that is made. Raises NoVolumes, DriverError."""
        volume = self.require().add_volume(path)
        self._tend(path)
        return self.views([volume])[0]

    def remove(self, path: Path) -> None:
        """Take a volume from the cache, also while images are read.

        Raises NoVolumes, NotFound; DriverError, VolumeInUse if a foreign device is attached to it.
        """
        if not self.require().remove_volume(path):
            raise NotFound(f"{str(path)!r} is no volume of the cache")
        self._tend(path)

    def _tend(self, path: Path) -> None:
        self._upkeep.tend_all()
        self._upkeep.tend_volume(path)
