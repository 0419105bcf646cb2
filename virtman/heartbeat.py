"""The heartbeat: tells Volt that this host lives and what it has, and hands Volt's answer on.

It runs in a thread of its own that does nothing slow, so that no operation on this host can delay it.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from drivers.host.watch import Watch
from virtman.errors import VirtmanError
from volt.client import HeartbeatAnswer

log = logging.getLogger(__name__)

FIRST_INTERVAL = 1.0
"""Seconds until the next try when Volt has never answered; afterwards Volt's own interval counts."""

EARLIER = 0.2
"""Part of the interval by which a beat may come sooner."""


class Heartbeat:
    """``beat`` asks Volt; ``handle`` gets its answer, or None when there was none, and must return quickly."""

    def __init__(
        self,
        beat: Callable[[], HeartbeatAnswer],
        handle: Callable[[HeartbeatAnswer | None], None],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._beat = beat
        self._handle = handle
        self._wake = threading.Event()
        self._stopped = False
        self._interval = FIRST_INTERVAL
        self._chance = chance
        self._thread = Watch("heartbeat", self._run)
        self.connected = False
        self.trouble: str | None = "not connected yet"

    def start(self) -> None:
        self._thread.start()

    def soon(self) -> None:
        """Beat now: something changed that others wait for."""
        self._wake.set()

    def stop(self) -> None:
        """End after the beat that is under way."""
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def pause(self, interval: float) -> float:
        """Seconds until the next beat: sooner by chance, so that hosts which were started together drift apart."""
        return interval * (1 - EARLIER * self._chance())

    def _run(self) -> None:
        while not self._stopped:
            answer = self._ask()
            try:
                self._handle(answer)
            except Exception:
                log.exception("handling Volt's answer failed")
            self._wake.wait(self.pause(self._interval))
            self._wake.clear()

    def _ask(self) -> HeartbeatAnswer | None:
        try:
            answer = self._beat()
        except Exception as error:  # a bug must not silence this host
            if not isinstance(error, VirtmanError):
                log.exception("heartbeat failed")
            self._note(str(error) if isinstance(error, VirtmanError) else repr(error))
            return None
        self._interval = answer.interval_s
        self._note(None)
        return answer

    def _note(self, trouble: str | None) -> None:
        connected = trouble is None
        if self.connected and not connected:
            log.warning("no heartbeat: %s", trouble)
        elif connected and not self.connected:
            log.info("connected to Volt")
        self.connected, self.trouble = connected, trouble
