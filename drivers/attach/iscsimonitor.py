"""One thread that watches all images of a host: their maps, their sessions and their disks.

Each image has a thread of its own, which acts, and sleeps until the monitor wakes it. The one health check of parents
is measured here: no read of a disk has come back for ``STALL`` seconds, though reads of the map wait.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivers.host.watch import Watch
from drivers.iscsi.names import image_of
from drivers.iscsi.records import Target
from drivers.iscsi.sessions import sessions
from drivers.kernel import devmapper
from drivers.kernel.alarm import Alarm
from drivers.kernel.diskstats import StallClock

if TYPE_CHECKING:
    from drivers.attach.iscsiroute import Route

INTERVAL, CALM_INTERVAL = 0.25, 1.0
"""Seconds between two checks of disks; and between two of sessions, while every image has all that it wants."""

STALL = 1.25
"""Seconds without a completed read after which a parent is left, if another parent answers a read."""

_UNDER_WAY = 8
"""The field of a map's counters with the requests that have not completed (Linux: block/stat)."""


class Monitor:
    """Watches the images that were added."""

    def __init__(self, prefix: str) -> None:
        """``prefix``: how the names of the maps begin. Nothing runs before the first image is added."""
        self._prefix = prefix
        self._lock = threading.Lock()
        self._routes: list[Route] = []
        self._stopped = threading.Event()
        self._thread: Watch | None = None
        self._clock = StallClock()
        self._stalls: Mapping[str, float] = {}
        self._events: Mapping[str, int] = {}
        self._logins: Mapping[Target, str] = {}
        self._next_check = 0.0
        """When sessions are checked next, though all images are settled."""

    def add(self, route: Route) -> None:
        """Watch one more image. Raises OSError without a thread."""
        with self._lock:
            if self._thread is None:
                thread = Watch("monitor-of-parents", self._run, self._stopped)
                thread.start()
                self._thread = thread
            self._routes.append(route)

    def remove(self, route: Route) -> None:
        """Stop watching an image. One that is not watched is fine."""
        with self._lock, contextlib.suppress(ValueError):
            self._routes.remove(route)

    def is_stalled(self, number: str) -> bool:
        """Whether no read of this disk has come back for STALL seconds, while reads of its map wait."""
        return self._stalls.get(number, 0) >= STALL

    def close(self) -> None:
        """Stop for good. Once more is fine."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        alarm, event = Alarm(), True
        try:
            while not self._stopped.is_set():
                if event:  # armed before the check, so that no event is missed
                    alarm.arm()
                with self._lock:
                    routes = list(self._routes)
                if event:
                    self._check_maps(routes)
                self._check_sessions(routes)
                self._check_disks(routes)
                event = alarm.wait(INTERVAL)
        finally:
            alarm.close()

    def _check_maps(self, routes: list[Route]) -> None:
        before, self._events = self._events, devmapper.all_events(self._prefix)
        for route in routes:
            if before.get(route.map) != self._events.get(route.map):
                route.wake()

    def _check_sessions(self, routes: list[Route]) -> None:
        now = time.monotonic()
        if now < self._next_check and all(route.settled for route in routes):
            return
        self._next_check = now + CALM_INTERVAL
        logins = {target: session.folder for target, session in sessions().items() if session.logged_in}
        changed = {image_of(target.name) for target, _ in logins.items() ^ self._logins.items()}
        self._logins = logins
        for route in routes:
            if route.image.name in changed:
                route.note_logins()

    def _check_disks(self, routes: list[Route]) -> None:
        """Measure the disks of the images whose maps have requests under way."""
        users = {number: route for route in routes if _is_busy(route.map) for number in route.disks}
        self._stalls = self._clock.measure(users.keys(), time.monotonic())
        for number, route in users.items():
            if self.is_stalled(number):
                route.note_stall(number)


def _is_busy(name: str) -> bool:
    """Whether a map has requests that have not completed. Raises OSError without room to check."""
    try:
        return devmapper.counted(name)[_UNDER_WAY] != "0"
    except FileNotFoundError:
        return False
