"""The four drivers of a host's stack, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from drivers.base import AttachDriver, CacheDriver, CacheGroup, DeviceCache, ExportDriver, SnapshotDriver, Volume


@dataclass(frozen=True)
class HostDrivers:
    """One driver per layer."""

    attach: AttachDriver
    cache: CacheDriver
    export: ExportDriver
    snapshot: SnapshotDriver

    @property
    def cache_group(self) -> CacheGroup | None:
        """The cache driver, if it has volumes."""
        return self.cache if isinstance(self.cache, CacheGroup) else None

    def volumes(self) -> list[Volume]:
        """The volumes of the cache; none if the driver has none. Raises DriverError."""
        return [] if (group := self.cache_group) is None else group.volumes()

    @property
    def device_cache(self) -> DeviceCache | None:
        """The cache driver, if devices of others can be read through it."""
        return self.cache if isinstance(self.cache, DeviceCache) else None
