"""Keeps this host's places in Volt's trees as Volt says, and tells Volt of parents that were lost.

A stack and its place in the tree have keys of their own: while Volt is away, or says what cannot be followed, a process
that died is started again at once. A place and its lost parents have separate keys, too, so neither waits for the
other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection
from functools import partial

from virtman import following, hosting, origins
from virtman.errors import ContentChanged, StateDamaged
from virtman.records import ImageRecord
from virtman.stacks import Stacks
from virtman.workqueue import Job, Pool, WorkQueue
from volt.client import Assignment

PLACE, LOST, CHILDREN = "place of ", "lost parents of ", "children of "
"""Keys; the name of an image follows."""

ADMIT = "admit children"


class PlaceKeeper:
    """Follows what Volt says of the images of ``stacks``."""

    def __init__(self, stacks: Stacks, queue: WorkQueue) -> None:
        self._stacks, self._queue = stacks, queue
        self._lock = threading.Lock()
        self._heard: dict[str, Assignment] = {}
        """By image, what Volt said last, until it is followed."""
        self._absent: set[str] = set()
        """Images in whose tree this host has no place, as Volt said last."""
        self._lost: dict[str, set[str]] = {}
        """By image, parents that a driver lost, until Volt is told."""

    # What happens

    def hear(self, assignments: Collection[Assignment], absent: Collection[str]) -> None:
        """Volt has answered a heartbeat."""
        self._absent = set(absent)
        self._hear_of_places(assignments)
        for image in absent:
            self._queue.wake(PLACE + image)

    def _hear_of_places(self, assignments: Collection[Assignment]) -> None:
        for assignment in assignments:
            with self._lock:
                known = self._heard.get(assignment.image)
                if known is not None and known.revision > assignment.revision:
                    continue
                self._heard[assignment.image] = assignment
            self._queue.wake(CHILDREN + assignment.image, ask=ADMIT)
            news = known is None or known.revision != assignment.revision
            self._queue.wake(PLACE + assignment.image, now=news)

    def parent_lost(self, image: str, host: str) -> None:
        """A driver lost a parent: have Volt told. Returns at once."""
        with self._lock:
            self._lost.setdefault(image, set()).add(host)
        self._queue.wake(LOST + image, now=True)

    def keys(self) -> list[str]:
        return [PLACE + name for name in self._stacks.records.names()]

    def released(self, image: str) -> None:
        """An operation on an image has ended, or a VM of it is gone. Returns at once."""
        self._queue.wake(PLACE + image)
        if image in self._lost:
            self._queue.wake(LOST + image)

    # What is to be done

    def plan(self, record: ImageRecord) -> Job | None:
        """Whether Volt says something else of the stack's place in the tree than its record."""
        name = record.name
        if record.leaving:
            return Job("leave Volt's tree", partial(hosting.leave_later, self._stacks, name), Pool.VOLT)
        if not record.steady:
            return None
        if origins.is_unwanted(self._stacks, record):  # the end of a VM wakes this key
            return Job("drop what was unpublished", partial(origins.drop_origin, self._stacks, name))
        if name in self._absent:
            return None if record.given_up else Job("join again", partial(self._rejoin, name), Pool.VOLT)
        return self._plan_following(record)

    def _plan_following(self, record: ImageRecord) -> Job | None:
        heard = self._heard.get(record.name)
        if heard is None:
            return None
        if heard.revision <= record.revision:
            self._forget(heard)
            return None
        if record.in_place is not None and not self._stacks.source.serving(record.name):
            return None  # a host that does not serve confirms nothing by which others would read from it again
        return Job("follow", partial(self._follow, heard), on_demand=True)

    def plan_without_stack(self, name: str) -> Job | None:
        """Whether Volt has a place for this host, which has no stack."""
        heard = self._heard.get(name)
        if heard is None:
            return None
        return Job("give up a place without a stack", partial(self._leave_unknown, heard), Pool.VOLT)

    def plan_lost(self, record: ImageRecord) -> Job | None:
        """Whether Volt is to be told of lost parents."""
        if record.leaving:
            self.forget_lost(record.name)
        if not record.steady or not self._lost.get(record.name):
            return None
        return Job("report", partial(self._report, record.name), Pool.VOLT)

    def forget_lost(self, name: str) -> None:
        """The stack is gone: a later one may read from the same parent, alive again."""
        with self._lock:
            self._lost.pop(name, None)

    def plan_children(self, name: str) -> Job | None:
        """Whether children are to be admitted. This does not wait for operations on the image."""
        if not self._queue.asked(CHILDREN + name, ADMIT):
            return None
        return Job(ADMIT, partial(self._admit, name), Pool.CHILDREN, on_demand=True)

    def _admit(self, image: str) -> None:
        heard = self._heard.get(image)
        if heard is not None:  # else it was followed, which admits the children, too
            with contextlib.suppress(StateDamaged):  # status tells of it
                following.admit(self._stacks, heard)

    def _leave_unknown(self, assignment: Assignment) -> None:
        following.leave_unknown(self._stacks, assignment.image)
        self._forget(assignment)

    def _report(self, name: str) -> None:
        with self._lock:
            hosts = self._lost.pop(name, set())
        for host in sorted(hosts):
            try:
                assignment = following.report_lost(self._stacks, name, host)
            except BaseException:
                with self._lock:
                    self._lost.setdefault(name, set()).update(hosts)  # to be tried again
                raise
            hosts.discard(host)
            if assignment is not None:  # a job of its own follows it, so that Volt is not told twice
                self._hear_of_places([assignment])

    def _rejoin(self, name: str) -> None:
        following.rejoin(self._stacks, name)
        self._absent.discard(name)

    def _follow(self, assignment: Assignment) -> None:
        try:
            following.follow(self._stacks, assignment)
        except ContentChanged:
            self._forget(assignment)  # this host has left, so Volt's word does not matter any more
            raise
        self._forget(assignment)

    def _forget(self, assignment: Assignment) -> None:
        with self._lock:
            if self._heard.get(assignment.image) is assignment:
                del self._heard[assignment.image]
