"""The disks by which one image's map reads, whose they are, and what the kernel tells of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from drivers.iscsi.disks import answers
from drivers.iscsi.lookout import Lookout
from drivers.iscsi.records import Target
from drivers.iscsi.sessions import link_to
from drivers.kernel import diskstats, tcpsockets

log = logging.getLogger(__name__)

_NODES = Path("/sys/dev/block")

_OTHER_LIMIT = 2.0
"""Seconds for which another parent may take to answer a read, to be the better one."""


class Paths:
    """May be used by several threads. It is what an image's doubts look at (drivers/attach/doubts.py, Signs)."""

    def __init__(self, lookout: Lookout) -> None:
        """Without any disk."""
        self._lookout = lookout
        self._lock = threading.Lock()
        self._disks: Mapping[str, Target] = {}
        """By their numbers. Not changed, but made anew: who looks at it holds no lock."""

    @property
    def disks(self) -> Mapping[str, Target]:
        """Whose disks are in the map, or are until its paths have changed, by their numbers."""
        return self._disks

    def add(self, disks: Mapping[str, Target]) -> None:
        """These as well."""
        with self._lock:
            self._disks = {**self._disks, **disks}

    def replace(self, target: Target, number: str) -> None:
        """This one instead of those that its target had."""
        with self._lock:
            self._disks = {**{had: other for had, other in self._disks.items() if other != target}, number: target}

    def keep(self, wanted: Callable[[str, Target], bool]) -> None:
        """Only these, of what there is now."""
        with self._lock:
            self._disks = {number: target for number, target in self._disks.items() if wanted(number, target)}

    # What is seen of the parents

    def reads(self, parent: Target) -> int:
        """How many reads of its disk have come back. Raises OSError."""
        found = diskstats.counts(self._numbers(parent), lambda file: Path(file).read_text())
        return sum(each.reads for each in found.values())

    def stands_still(self, parent: Target, seconds: float) -> bool:
        """Whether none of the reads of its disk has come back for so long."""
        return bool(self._lookout.stand_still(self._numbers(parent), seconds))

    def first_that_answers(self, parents: Collection[Target]) -> Target | None:
        """Which of these answers a read first. None hides another: all are asked side by side.

        Reads that are not awaited any more are left to their threads, which end after _OTHER_LIMIT.
        """
        disks = {number: target for number, target in self._disks.items() if target in parents}
        pool = ThreadPoolExecutor(max(1, len(disks)), thread_name_prefix="asking-parents")
        try:
            asked = {
                pool.submit(answers, (_NODES / number).resolve(), _OTHER_LIMIT): target
                for number, target in disks.items()
            }
            return next((asked[answer] for answer in as_completed(asked) if answer.result()), None)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def is_silent(self, parent: Target, seconds: float) -> bool:
        """Whether its host has acknowledged nothing for so long; no if the kernel cannot tell."""
        return self._of_link(parent, lambda link: tcpsockets.is_silent(link, seconds))

    def awaits_acknowledgement(self, parent: Target) -> bool:
        """Whether its host owes an acknowledgement; no if the kernel cannot tell."""
        return self._of_link(parent, tcpsockets.awaits_acknowledgement)

    def is_asked_again_within(self, parent: Target, seconds: float) -> bool:
        """Whether TCP asks its host again by then; no if the kernel cannot tell."""
        return self._of_link(parent, lambda link: tcpsockets.sends_again_within(link, seconds))

    def takes_connections(self, parent: Target) -> bool:
        """Whether a new connection to it comes about, now or lately."""
        return self._lookout.knocks.open((parent.ip, parent.port))

    def end(self, parent: Target) -> None:
        """End the connection to it, if there is one. Raises OSError, also on a kernel that cannot."""
        if (link := self._link(parent)) is not None:
            tcpsockets.end(link)

    def _numbers(self, parent: Target) -> list[str]:
        return [number for number, other in self._disks.items() if other == parent]

    def _of_link(self, parent: Target, ask: Callable[[tcpsockets.Link], bool]) -> bool:
        """What is asked of the connection to a parent; no if there is none."""
        try:
            link = self._link(parent)
            return link is not None and ask(link)
        except OSError as error:
            log.debug("asking for the connection to %s: %s", parent, error)
            return False

    def _link(self, parent: Target) -> tcpsockets.Link | None:
        """Raises OSError."""
        return link_to(parent) if self._numbers(parent) else None
