"""What the agent does unasked: follow Volt, repair what died, let go of what nobody needs, and count."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from drivers.base import CacheStats, Image, Parent, PathState, PathStatus, Volume
from drivers.errors import DriverError, NotAttached
from virtman.hostdrivers import HostDrivers
from virtman.records import ImagePhase, ImageRecord, Role
from virtman.stacks import Stacks
from virtman.workers import Workers
from volt.client import Assignment, HeartbeatAnswer, NodeReport

log = logging.getLogger(__name__)

NOTHING = CacheStats(0, 0)


class Upkeep:
    """``changed`` is called when Volt should hear from this host soon; ``idle_grace`` in seconds."""

    def __init__(
        self, stacks: Stacks, drivers: HostDrivers, workers: Workers, changed: Callable[[], None], idle_grace: float
    ) -> None:
        self._stacks = stacks
        self._drivers = drivers
        self._workers = workers
        self._changed = changed
        self._idle_grace = idle_grace
        self._idle_since: dict[str, float] = {}
        self._stats: dict[str, CacheStats] = {}
        self.volumes: list[Volume] = []
        """The volumes of the cache when they were looked at last; none if the driver has none."""
        self.stopped = False

    def handle(self, answer: HeartbeatAnswer | None) -> None:
        """Start what Volt's answer, or its silence, asks for. Returns at once."""
        if self.stopped:
            return
        if answer is not None:
            for assignment in answer.assignments:
                self._workers.submit(f"admit {assignment.image}", partial(self._stacks.admit, assignment))
                self._workers.submit(f"follow {assignment.image}", partial(self._follow, assignment))
            for name in answer.absent:
                self._workers.submit(f"rejoin {name}", partial(self._rejoin, name))
        self.tend_all()
        if not self._workers.busy("volumes"):
            self._workers.submit("volumes", self.look_at_volumes)

    def tend_all(self) -> None:
        """Look after every stack, each in a job of its own."""
        for record in self._stacks.records():
            key = f"tend {record.name}"
            if not self._workers.busy(key):
                self._workers.submit(key, partial(self._tend, record.name))

    def parent_lost(self, image: Image, parent: Parent) -> None:
        """A driver lost a parent: have Volt told. Returns at once."""
        if not self.stopped:
            self._workers.submit(f"report {image.name} {parent.host}", partial(self._report, image, parent))

    def died(self, image: str) -> None:
        """The process that serves an image died: start it again. Returns at once."""
        if not self.stopped:
            self._workers.submit(f"restore {image}", partial(self._stacks.restore, image))

    def reports(self) -> list[NodeReport]:
        """What Volt is told of this host's images; touches nothing that could be slow."""
        return [
            NodeReport(
                image=record.name,
                revision=record.revision,
                fetched_bytes=self.stats(record.name).held_bytes,
                parent=self.parent_in_use(record),
            )
            for record in self._stacks.records()
            if record.phase is ImagePhase.ATTACHED
        ]

    def parent_in_use(self, record: ImageRecord) -> str | None:
        """The host that misses are read from now."""
        return next((path.parent.host for path in self.paths(record) if path.state is PathState.ACTIVE), None)

    def paths(self, record: ImageRecord) -> list[PathStatus]:
        """The routes to the image's parents; none for an origin, and for a stack that is yet to be restored."""
        if record.role is Role.ORIGIN:
            return []
        try:
            return self._drivers.attach.paths(record.name)
        except NotAttached:
            return []

    def stats(self, image: str) -> CacheStats:
        """What the image's cache held when it was looked at last."""
        return self._stats.get(image, NOTHING)

    def refresh(self, record: ImageRecord) -> CacheStats:
        """Look at the image's cache now; what was seen last counts while its daemon is being started again."""
        if record.role is Role.HOST and record.phase is ImagePhase.ATTACHED:
            try:
                self._stats[record.name] = self._drivers.cache.stats(record.image)
            except (DriverError, OSError) as error:  # the kernel may be taking it away, or its disk may be dying
                log.info("image %s: its cache cannot be looked at now: %s", record.name, error)
        return self.stats(record.name)

    def look_at_volumes(self) -> list[Volume]:
        """Look at the volumes of the cache now. Raises DriverError."""
        if (group := self._drivers.cache_group) is not None:
            self.volumes = group.volumes()
        return self.volumes

    def _follow(self, assignment: Assignment) -> None:
        if not self._stacks.known(assignment.image):
            self._stacks.leave_unknown(assignment.image)
            return
        self._stacks.follow(assignment)
        self._changed()

    def _rejoin(self, name: str) -> None:
        self._stacks.rejoin(name)
        self._changed()

    def _report(self, image: Image, parent: Parent) -> None:
        self._stacks.parent_lost(image, parent)
        self._changed()

    def _tend(self, name: str) -> None:
        record = self._stacks.find(name)
        if record is None or self.stopped:
            self._idle_since.pop(name, None)
            return
        if record.phase is ImagePhase.LEAVING:
            self._stacks.leave_later(name)
        elif record.phase is ImagePhase.ATTACHED:
            if not self._stacks.serving(name):
                self._stacks.restore(name)
            self.refresh(record)
            self._let_go(record)

    def _let_go(self, record: ImageRecord) -> None:
        if not self._stacks.idle(record):
            self._idle_since.pop(record.name, None)
            return
        since = self._idle_since.setdefault(record.name, time.monotonic())
        if time.monotonic() - since >= self._idle_grace and self._stacks.remove_if_idle(record.name):
            log.info(
                "image %s: nobody needed it for %.0f s; its stack is gone, its cache is kept",
                record.name,
                self._idle_grace,
            )
            self._idle_since.pop(record.name, None)
