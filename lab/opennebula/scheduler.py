"""How OpenNebula paces a wave of VMs: a plan, of which each pass starts some actions, in their order.

The first pass comes with the plan; the others come with a timer, however soon actions end. A pass ends at the first
action that may not start yet, even if later ones are for hosts with nothing to do.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Settings of oned.conf. As they come with OpenNebula 7.4, unless given."""

    actions_per_host: int = 1
    """MAX_ACTIONS_PER_HOST."""
    actions_per_cluster: int = 30
    """MAX_ACTIONS_PER_CLUSTER."""
    manager_timer: float = 15.0
    """MANAGER_TIMER: seconds from one pass to the next."""
    threads: int = 15
    """``-t`` of TM_MAD."""


class Plan:
    """Actions, each for a host, that are to be started in their order. May be used by many threads at once."""

    def __init__(self, hosts: Sequence[str], pace: Pace) -> None:
        self._hosts = list(hosts)
        self._pace = pace
        self._begun = 0
        self._running: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def all_begun(self) -> bool:
        """Whether there is nothing left to start."""
        return self._begun == len(self._hosts)

    def next_pass(self) -> list[int]:
        """The numbers of the actions that start now."""
        with self._lock:
            first = self._begun
            while not self.all_begun and self._may_start(self._hosts[self._begun]):
                self._running[self._hosts[self._begun]] += 1
                self._begun += 1
            return list(range(first, self._begun))

    def _may_start(self, host: str) -> bool:
        pace = self._pace
        return self._running[host] < pace.actions_per_host and self._running.total() < pace.actions_per_cluster

    def ended(self, action: int) -> None:
        """An action has ended, well or not."""
        with self._lock:
            self._running[self._hosts[action]] -= 1


@dataclass(frozen=True)
class Carried:
    """How a plan went; seconds."""

    all_s: float
    """From the start of the first action to the end of the last one."""
    each_s: list[float]
    """Of each action, with what it waited for a thread of the driver."""
    passes: int


def carry_out(hosts: Sequence[str], pace: Pace, act: Callable[[int], object]) -> Carried:
    """Do ``act(number)`` for the action of each host. The first error is raised when all that were begun have ended."""
    plan, failed = Plan(hosts, pace), threading.Event()
    seconds = [0.0] * len(hosts)
    futures: list[Future[None]] = []

    def one(action: int) -> None:
        began = time.monotonic()
        try:
            act(action)
        except BaseException:
            failed.set()
            raise
        finally:
            seconds[action] = time.monotonic() - began
            plan.ended(action)

    pool = ThreadPoolExecutor(max(1, len(hosts)))
    try:
        started, passes = time.monotonic(), 0
        while True:
            futures += [pool.submit(one, action) for action in plan.next_pass()]
            passes += 1
            if plan.all_begun:
                break
            if failed.wait(max(0.0, started + passes * pace.manager_timer - time.monotonic())):
                break
        for future in futures:
            future.exception()
        ended = time.monotonic()
    finally:
        # All have ended, unless this was interrupted: then nobody waits for copies that are to be thrown away.
        pool.shutdown(wait=False, cancel_futures=True)
    for future in futures:
        future.result()
    return Carried(ended - started, seconds, passes)
