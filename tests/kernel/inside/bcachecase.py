"""What the tests of the bcache driver share."""

from __future__ import annotations

from drivers.cache.bcache import BcacheCache
from tests.kernel.inside.caches import CacheCase


class BcacheCase(CacheCase):
    """A cache on the guest's disk."""

    cache: BcacheCache

    def new_cache(self) -> BcacheCache:
        """A driver as an agent that starts has it."""
        return BcacheCache(self.place)
