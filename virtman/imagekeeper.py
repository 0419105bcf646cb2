"""Keeps what this host has of images as their records say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

from drivers.base import CacheStats, PathState
from drivers.errors import DriverError
from virtman import bootsets, hosting, hydrating, serving
from virtman.deploying import HYDRATION
from virtman.records import ImageRecord, Role
from virtman.stacks import Stacks
from virtman.workqueue import Job, Pool, WorkQueue
from volt.client import NodeReport

log = logging.getLogger(__name__)

USED_CHECK, IDLE_CHECK = 4.0, 30.0
"""Seconds at least between checks, which come with a heartbeat: of an image that VMs or children of this host use, and
of an image that nobody uses. A check compares an image in place with its record, reads the figures of the cache, and
looks for a better parent. An image in place is checked with each heartbeat. Drivers tell at once of processes that end
(drivers/base.py, Died)."""

IMAGE, CONTENT, BOOT_SET = "image ", "content of ", "boot set of "
"""Keys: a stack, the digest of an image in place, and what VMs read first. A name follows."""

TAKE_OVER, CHECK = "take over", "check"
"""Jobs: make a stack what its record says, and watch the parents; inspect a stack that is served."""

NOTHING = CacheStats(0, 0)


class ImageKeeper:
    """``idle_grace``: seconds that a stack nobody needs is kept; ``clock`` in seconds, as ``time.monotonic``.

    ``gone`` is called when an image has no stack any more.
    """

    def __init__(
        self, stacks: Stacks, queue: WorkQueue, gone: Callable[[], None], idle_grace: float, clock: Callable[[], float]
    ) -> None:  # fmt: skip
        self._stacks, self._queue = stacks, queue
        self._gone = gone
        self._idle_grace = idle_grace
        self._clock = clock
        self._stats: dict[str, CacheStats] = {}
        """What caches held at the last check, for reports that must not wait."""
        self._idle_since: dict[str, float] = {}
        self._next_check: dict[str, float] = {}
        self._withdrawn: set[str] = set()
        """Images that are to go as soon as nobody needs them, as Volt said last."""

    def take_over(self) -> None:
        """Have every stack built anew where it is not what its record says, and its parents watched."""
        for key in self.keys():
            self._queue.wake(key, ask=TAKE_OVER)

    def taking_over(self) -> bool:
        """Whether a stack is being taken over now. One that failed waits for its next try."""
        return any(self._queue.asked(key, TAKE_OVER) and self._queue.busy(key) for key in self.keys())

    def keys(self) -> list[str]:
        return [IMAGE + name for name in self._stacks.records.names()]

    def needy(self) -> set[str]:
        """Images whose stacks are not served as their records say."""
        records = [record for record in self._stacks.records.all() if not record.leaving]
        return {record.name for record in records if not (record.steady and self._stacks.source.serving(record.name))}

    def tend(self) -> None:
        """A heartbeat: have images checked that are due. Touches nothing that could be slow."""
        now, troubles = self._clock(), self._queue.troubles()
        for record in self._stacks.records.all():
            key = IMAGE + record.name
            if now >= self._next_check.get(record.name, now):
                self._queue.wake(key, now=record.in_place is not None and key in troubles, ask=CHECK)  # may be back
            if record.hydrate:
                self._queue.wake(HYDRATION + record.name)
            if bootsets.is_complete(self._stacks, record):
                self._queue.wake(BOOT_SET + record.name)

    def withdraw(self, images: Collection[str]) -> None:
        """Volt says which images are withdrawn."""
        self._withdrawn = set(images)
        for image in images:
            self._queue.wake(IMAGE + image)

    def died(self, image: str) -> None:
        """The process that serves an image died: have it started again. Returns at once."""
        log.warning("image %s: the process that serves it died", image)
        self._queue.wake(IMAGE + image)

    def released(self, image: str) -> None:
        """An operation on an image has ended, or a VM of it is gone. Returns at once."""
        self._queue.wake(IMAGE + image, ask=CHECK)
        self._queue.wake(CONTENT + image)
        self._queue.wake(HYDRATION + image)

    def plan(self, record: ImageRecord) -> Job | None:
        """What is to be done for a stack."""
        name = record.name
        if record.leaving:
            return None
        pool = Pool.LONG if record.in_place is None else Pool.STORAGE  # the storage of one in place may not answer
        restore = partial(serving.restore, self._stacks, name)
        if record.operation is not None:
            return Job("repair", restore, Pool.VOLT)
        if self._queue.asked(IMAGE + name, TAKE_OVER):
            return Job(TAKE_OVER, restore, pool, on_demand=True)
        if not self._stacks.source.serving(name):
            return Job("serve", restore, pool)
        return self._plan_served(record, pool)

    def _plan_served(self, record: ImageRecord, pool: Pool) -> Job | None:
        """A stack that is served: it may go, or is to be checked."""
        name = record.name
        if name in self._withdrawn and not self._stacks.needed(record):
            return Job("remove what is withdrawn", partial(self._remove_withdrawn, name), Pool.VOLT)
        if self._queue.asked(IMAGE + name, CHECK):
            return Job(CHECK, partial(self._check, name), pool, on_demand=True)
        if self._clock() - self._idle_since.get(name, float("inf")) >= self._idle_grace:
            return Job("remove an idle stack", partial(self._remove_idle, name), Pool.VOLT)
        return None

    def plan_content(self, record: ImageRecord) -> Job | None:
        """Whether the digest of an image in place is asked for."""
        if not serving.wants_digest(self._stacks, record):
            return None
        return Job("compute the digest", partial(serving.compute_digest, self._stacks, record.name), Pool.SLOW)

    def plan_boot_set(self, record: ImageRecord) -> Job | None:
        """Whether Volt is to hear what VMs of this host read first."""
        if not bootsets.is_complete(self._stacks, record):
            return None
        return Job("tell Volt", partial(bootsets.tell, self._stacks, record.name), Pool.VOLT)

    def forget(self, name: str) -> None:
        """There is no stack any more."""
        for known in (self._idle_since, self._next_check, self._stats):
            known.pop(name, None)
        self._gone()

    def _check(self, name: str) -> None:
        record = self._stacks.records.get(name)
        if record is not None and record.steady:
            if record.in_place is not None:
                serving.check_in_place(self._stacks, record)
            self.inspect(record)
            self._note_idle(record)
            if self._stacks.source.unsettled(name):
                log.info("image %s: a parent that was left is well again", name)
                serving.restore(self._stacks, name)

    def _note_idle(self, record: ImageRecord) -> None:
        name, now, used = record.name, self._clock(), self._stacks.needed(record)
        if used or record.hydrate or record.role is Role.ORIGIN:
            self._idle_since.pop(name, None)
            pause = 0.0 if record.in_place is not None else USED_CHECK if used else IDLE_CHECK
        else:
            left = self._idle_grace - (now - self._idle_since.setdefault(name, now))
            pause = min(IDLE_CHECK, left) if left > 0 else IDLE_CHECK
        self._next_check[name] = now + pause

    def _remove_withdrawn(self, name: str) -> None:
        self._withdrawn.discard(name)  # Volt says it again of an image that is still here
        if hosting.remove_withdrawn(self._stacks, name):
            log.info("image %s: is withdrawn, and nobody needs it", name)

    def _remove_idle(self, name: str) -> None:
        removed = hosting.remove_if_idle(self._stacks, name)
        self._idle_since.pop(name, None)
        if removed:
            log.info("image %s: nobody needed it for %.0f s; its cache is kept", name, self._idle_grace)

    # What caches hold, and what is read from

    def stats(self, image: str) -> CacheStats:
        """What the image's cache held at the last check."""
        return self._stats.get(image, NOTHING)

    def inspect(self, record: ImageRecord) -> CacheStats:
        """What the image's cache holds now; the last known figures while the chunk store is being started again."""
        if record.role is Role.HOST and record.steady:
            try:
                self._stats[record.name] = self._stacks.source.held(record.image)
            except DriverError as error:  # the kernel may be taking it away, or its disk may be dying
                log.info("image %s: its cache cannot be inspected now: %s", record.name, error)
        return self.stats(record.name)

    def report(self, record: ImageRecord) -> NodeReport:
        """What Volt is told of an image. Touches nothing that could be slow."""
        paths = self._stacks.source.paths(record.name)  # none of an origin, and of a stack that is yet to be restored
        active = (path.parent.host for path in paths if path.state is PathState.ACTIVE)
        return NodeReport(
            image=record.name,
            revision=record.revision,
            fetched_bytes=self.stats(record.name).held_bytes,
            parent=next(active, None),
            whole=hydrating.is_whole(self._stacks, record),
            sent_bytes=self._stacks.source.filled(record.name).sent,
        )
