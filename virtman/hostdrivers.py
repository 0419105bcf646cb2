"""What the agent has of drivers."""

from __future__ import annotations

from dataclasses import dataclass

from drivers.base import CacheGroup, DeviceCache, ImageSource, VmDiskDriver
from drivers.cachemodels import Volume


@dataclass(frozen=True)
class HostDrivers:
    """``cache_group``: what has the volumes of the cache; ``device_cache``: what caches devices of others."""

    source: ImageSource
    snapshot: VmDiskDriver
    cache_group: CacheGroup | None = None
    device_cache: DeviceCache | None = None

    def volumes(self) -> list[Volume]:
        """The volumes of the cache; none if the driver has none. Raises DriverError."""
        return [] if self.cache_group is None else self.cache_group.volumes()
