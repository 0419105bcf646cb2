"""Keeps what this host has of images as their records say."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from functools import partial

from virtman.looks import Looks
from virtman.records import ImageRecord
from virtman.stacks import Stacks
from virtman.vms import Vms
from virtman.workqueue import Job, Pool, WorkQueue

log = logging.getLogger(__name__)

USED_LOOK, IDLE_LOOK = 4.0, 30.0
"""Seconds at least between looks, which come with a heartbeat, at an image that VMs or children of this host use, and
at one that nobody uses: whether it is served, and at its cache. What is served in place is looked at with each.
Drivers tell at once of processes that end (drivers/base.py, Died)."""

IMAGE, CONTENT = "image ", "content of "
"""Keys: a stack, and the digest of what is served in place. A name follows."""


class ImageKeeper:
    """``idle_grace``: seconds that a stack nobody needs is kept; ``clock`` in seconds, as ``time.monotonic``.

    ``gone`` is called when an image has no stack any more.
    """

    def __init__(
        self, stacks: Stacks, vms: Vms, looks: Looks, queue: WorkQueue, gone: Callable[[], None], idle_grace: float,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._stacks, self._vms, self._looks, self._queue = stacks, vms, looks, queue
        self._gone = gone
        self._idle_grace = idle_grace
        self._clock = clock
        self._lock = threading.Lock()
        self._idle_since: dict[str, float] = {}
        self._look_again: dict[str, float] = {}
        """When to look at images next."""
        self._unseen: set[str] = set()
        """Images that were not looked at since the last heartbeat."""
        self._unrestored: set[str] = set()
        """Images that this agent has yet to take over, whose parents it does not watch."""
        self._used: set[str] = set()
        """Images that VMs needed, or may have needed, at the last heartbeat: not asked for each image, which would read
        all records of VMs each time."""
        self._withdrawn: set[str] = set()
        """Images that are to go as soon as nobody needs them, as Volt said last."""

    def restore_all(self) -> None:
        """Have every stack built anew where it is not what its record says, and its parents watched."""
        with self._lock:
            self._unrestored |= self._stacks.names()

    def restoring(self) -> bool:
        """Whether a stack is being taken over now. One that failed waits for its next try."""
        with self._lock:
            names = list(self._unrestored)
        return any(self._queue.busy(IMAGE + name) for name in names)

    def keys(self) -> list[str]:
        """The keys of all stacks."""
        return [IMAGE + name for name in self._stacks.names()]

    def needy(self) -> set[str]:
        """Images whose stacks are not served as their records say."""
        records = [record for record in self._stacks.records() if not record.leaving]
        return {record.name for record in records if not (record.steady and self._stacks.serving(record.name))}

    def tend(self) -> None:
        """A heartbeat: have images looked at that are due."""
        records, now = self._stacks.records(), self._clock()
        vms, unreadable = self._vms.records.sorted_out()
        before, self._used = self._used, {each.name for each in records} if unreadable else {vm.image for vm in vms}
        due = {record.name for record in records if now >= self._look_again.get(record.name, now)}
        due |= {record.name for record in records} & (before ^ self._used)
        with self._lock:
            self._unseen |= due
        for record in records:
            if record.name in due or not record.steady:
                self._queue.wake(IMAGE + record.name, now=record.name in self._stacks.flaws)  # it may be back
                if self._stacks.wants_digest(record):
                    self._queue.wake(CONTENT + record.name)

    def withdraw(self, images: Collection[str]) -> None:
        """Volt says which images are withdrawn."""
        with self._lock:
            self._withdrawn = set(images)
        for image in images:
            self._queue.wake(IMAGE + image)

    def died(self, image: str) -> None:
        """The process that serves an image died: have it started again. Returns at once."""
        log.warning("image %s: the process that serves it died", image)
        self._queue.wake(IMAGE + image)

    def released(self, image: str) -> None:
        """An operation on an image has ended, or a VM of it is gone. Returns at once."""
        with self._lock:
            self._unseen.add(image)
        for kind in (IMAGE, CONTENT):
            self._queue.wake(kind + image)

    def plan(self, record: ImageRecord) -> Job | None:
        """What is to be done for a stack."""
        name = record.name
        if record.leaving:
            return None
        pool = Pool.LONG if record.in_place is None else Pool.PLACE  # the storage of one in place may not answer
        if record.operation is not None:
            return Job("repair", partial(self._restore, name), Pool.VOLT)
        if not self._stacks.serving(name) or name in self._unrestored:
            return Job("serve", partial(self._restore, name), pool)
        return self._plan_whole(record, pool)

    def _plan_whole(self, record: ImageRecord, pool: Pool) -> Job | None:
        """A stack that is served: it may go, or is to be looked at."""
        name = record.name
        if name in self._withdrawn and not self._stacks.needed(record):
            return Job("remove what is withdrawn", partial(self._remove_withdrawn, name), Pool.VOLT)
        if name in self._unseen:
            return Job("look", partial(self._look, name), pool, on_demand=True)
        if self._idle_for(name) >= self._idle_grace:
            return Job("remove an idle stack", partial(self._remove_idle, name), Pool.VOLT)
        return None

    def plan_content(self, record: ImageRecord) -> Job | None:
        """Whether the digest of what is served in place is asked for."""
        if not self._stacks.wants_digest(record):
            return None
        return Job("compute the digest", partial(self._stacks.compute_digest, record.name), Pool.SLOW)

    def forget(self, name: str) -> None:
        """There is no stack any more."""
        for kept in (self._idle_since, self._look_again):
            kept.pop(name, None)
        with self._lock:
            self._unseen.discard(name)
            self._unrestored.discard(name)
        self._looks.forget(name)
        self._gone()

    def _restore(self, name: str) -> None:
        self._stacks.restore(name)
        with self._lock:
            self._unrestored.discard(name)

    def _look(self, name: str) -> None:
        with self._lock:
            self._unseen.discard(name)
        record = self._stacks.find(name)
        if record is not None and record.steady:
            if record.in_place is not None:
                self._stacks.look(record)
            self._looks.refresh(record)
            self._note_idle(record)
            self._stacks.settle_parents(record)

    def _note_idle(self, record: ImageRecord) -> None:
        name, now = record.name, self._clock()
        used = record.children or name in self._used
        if used or not self._stacks.idle(record):  # if not any more, the next heartbeat sees it
            self._idle_since.pop(name, None)
            pause = 0.0 if record.in_place is not None else USED_LOOK if used else IDLE_LOOK
        else:
            left = self._idle_grace - (now - self._idle_since.setdefault(name, now))
            pause = min(IDLE_LOOK, left) if left > 0 else IDLE_LOOK
        self._look_again[name] = now + pause

    def _idle_for(self, name: str) -> float:
        return self._clock() - self._idle_since.get(name, float("inf"))

    def _remove_withdrawn(self, name: str) -> None:
        with self._lock:
            self._withdrawn.discard(name)  # Volt says it again of what is still here
        if self._stacks.let_go(name):
            log.info("image %s: it is withdrawn, and nobody needs it", name)

    def _remove_idle(self, name: str) -> None:
        removed = self._stacks.remove_if_idle(name)
        self._idle_since.pop(name, None)
        if removed:
            log.info("image %s: nobody needed it for %.0f s; its cache is kept", name, self._idle_grace)
