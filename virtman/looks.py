"""What this host's images are seen to hold and to read from."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from drivers.base import CacheStats, ImageSource, PathState, PathStatus
from drivers.errors import DriverError
from virtman.records import ImageRecord, Role
from volt.client import NodeReport

log = logging.getLogger(__name__)

NOTHING = CacheStats(0, 0)


class Looks:
    """Looks at images. What was seen last is kept, for reports that must not wait."""

    def __init__(self, source: ImageSource) -> None:
        self._source = source
        self._stats: dict[str, CacheStats] = {}

    def stats(self, image: str) -> CacheStats:
        """What the image's cache held when it was looked at last."""
        return self._stats.get(image, NOTHING)

    def refresh(self, record: ImageRecord) -> CacheStats:
        """Look at the image's cache now; what was seen last counts while its daemon is being started again."""
        if record.role is Role.HOST and record.steady:
            try:
                self._stats[record.name] = self._source.held(record.image)
            except (DriverError, OSError) as error:  # the kernel may be taking it away, or its disk may be dying
                log.info("image %s: its cache cannot be looked at now: %s", record.name, error)
        return self.stats(record.name)

    def forget(self, image: str) -> None:
        """The image has no stack any more."""
        self._stats.pop(image, None)

    def paths(self, record: ImageRecord) -> Sequence[PathStatus]:
        """The routes to the image's parents; none for an origin, and for a stack that is yet to be restored."""
        return [] if record.role is Role.ORIGIN else self._source.paths(record.name)

    def report(self, record: ImageRecord) -> NodeReport:
        """What Volt is told of an image. Touches nothing that could be slow."""
        active = (path.parent.host for path in self.paths(record) if path.state is PathState.ACTIVE)
        return NodeReport(
            image=record.name,
            revision=record.revision,
            fetched_bytes=self.stats(record.name).held_bytes,
            parent=next(active, None),
        )
