"""One thread that looks out for all images of a host: at their maps, sessions and disks.

Each image has a thread of its own, which acts; it sleeps until it is woken from here, or has something to wait for. So
an agent whose images are all well reads three small files of the kernel for each session, which it keeps open.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from drivers.host.keptfiles import KeptFiles
from drivers.host.watch import Watch
from drivers.iscsi.names import image_of
from drivers.iscsi.sessions import CLASS, forget, name_of, nudge
from drivers.kernel import devmapper
from drivers.kernel.alarm import Alarm
from drivers.kernel.diskstats import Standstill, counts, file_of

log = logging.getLogger(__name__)

Server = tuple[str, int]
"""Its IP address and port."""

STANDSTILL_INTERVAL, SESSION_INTERVAL = 0.25, 1.0
"""Seconds between two looks."""

BUSY = 10.0
"""Seconds after a change of a session or map in which sessions are looked at as often as disks: more may follow, and
reads wait for it.
"""

KNOCK_LIMIT = 0.25
"""Seconds for which a try to connect to a server is waited for."""

KNOWN = 0.1
"""Seconds from the beginning of a try for which it is not repeated."""

COARSE = 0.02
"""Seconds by which the clock that iscsid goes by may be late (CLOCK_MONOTONIC_COARSE: a tick, of 10 ms at most)."""

STANDSTILL = 1.0
"""Seconds for which no read of a disk comes back until its image is told."""


class Watched(Protocol):
    """What is looked out for. Its calls return at once."""

    @property
    def image(self) -> str:
        """The name of the image."""

    @property
    def map(self) -> str:
        """The name of its map."""

    @property
    def numbers(self) -> Collection[str]:
        """The disks that it reads by, ``major:minor``."""

    def wake(self) -> None:
        """Its map had an event, or one of its sessions is new, gone, or in another state."""

    def stands_still(self, number: str) -> None:
        """One of its disks does not get on with its reads. Called again while that is so."""


class Lookout:
    """Looks out for those that were added."""

    def __init__(self, prefix: str) -> None:
        """``prefix``: how the names of their maps begin. Nothing runs before the first is added."""
        self.knocks = Knocks()
        self.nudges = Nudges()
        self._prefix = prefix
        self._lock = threading.Lock()
        self._watched: list[Watched] = []
        self._stopped = threading.Event()
        self._alarm: Alarm | None = None
        self._thread: Watch | None = None
        self._standstill = Standstill()
        self._counters = KeptFiles()
        self._numbers: set[str] = set()
        """The disks whose counters are kept open."""
        self._still: Mapping[str, float] = {}
        self._events: Mapping[str, int] = {}
        self._sessions = Sessions()
        self._pace = Pace()

    def add(self, watched: Watched) -> None:
        """Look out for this one as well. Raises OSError without device-mapper, or without a thread."""
        with self._lock:
            if self._thread is None:
                self._begin()
            self._watched.append(watched)

    def _begin(self) -> None:
        alarm = Alarm()
        thread = Watch("lookout-for-parents", partial(self._run, alarm), self._stopped)
        try:
            thread.start()
        except OSError:
            alarm.close()  # the next one to be added tries again
            raise
        self._alarm, self._thread = alarm, thread

    def remove(self, watched: Watched) -> None:
        """Not any more, if it ever was."""
        with self._lock, contextlib.suppress(ValueError):
            self._watched.remove(watched)

    def stand_still(self, numbers: Iterable[str], seconds: float) -> set[str]:
        """Which of these disks have not got on with their reads for so long."""
        return {number for number in numbers if self._still.get(number, 0) >= seconds}

    def close(self) -> None:
        """Stop for good. Once more is fine."""
        with self._lock:
            thread, alarm = self._thread, self._alarm
            self._thread = self._alarm = None
        self._stopped.set()
        if thread is not None and alarm is not None:
            alarm.ring()
            thread.join()
            alarm.close()

    def _run(self, alarm: Alarm) -> None:
        event = True
        try:
            while not self._stopped.is_set():
                if event:  # else one that came just now would be taken for seen
                    alarm.arm()
                with self._lock:
                    watched = list(self._watched)
                if event:
                    self._look_at_maps(watched)
                self._look_at_sessions(watched)
                self._look_at_disks(watched)
                event = alarm.wait(STANDSTILL_INTERVAL)
        finally:
            self._counters.close()
            self._sessions.close()

    def _look_at_maps(self, watched: list[Watched]) -> None:
        before, self._events = self._events, devmapper.all_events(self._prefix)
        for each in watched:
            if before.get(each.map) != self._events.get(each.map):
                each.wake()
                # A session that is lost and back within a second is to be seen as well.
                self._pace.note_change(time.monotonic())

    def _look_at_sessions(self, watched: list[Watched]) -> None:
        now = time.monotonic()
        if not self._pace.is_due(now):
            return
        if changed := self._sessions.changed():
            self._pace.note_change(now)
        for each in watched:
            if each.image in changed:
                each.wake()

    def _look_at_disks(self, watched: list[Watched]) -> None:
        users = [(number, each) for each in watched for number in each.numbers]
        numbers = {number for number, _ in users}
        if numbers != self._numbers:
            self._counters.keep([file_of(number) for number in numbers])
            self._numbers = numbers
        self._still = self._standstill.look(numbers, counts(numbers, self._counters.read), time.monotonic())
        for number, each in users:
            if self._still.get(number, 0) >= STANDSTILL:
                try:
                    each.stands_still(number)
                except OSError as error:  # it has no thread now, and is told again; others are not to wait for that
                    log.warning("image %s: looking after a disk that stands still: %s", each.image, error)


class Pace:
    """When sessions are looked at next. Times in seconds."""

    def __init__(self) -> None:
        self._looked_at = self._busy_until = -math.inf

    def is_due(self, now: float) -> bool:
        """Whether to look now."""
        due = now - self._looked_at >= SESSION_INTERVAL or now < self._busy_until
        if due:
            self._looked_at = now
        return due

    def note_change(self, now: float) -> None:
        """One has changed, or is about to."""
        self._busy_until = now + BUSY


class Knocks:
    """Whether servers take connections, for many who ask: each is tried once in a while."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, knock: Callable[[Server], bool] | None = None
    ) -> None:
        """``clock`` in seconds; ``knock`` tries one, for KNOCK_LIMIT at most."""
        self._clock = clock
        self._knock = knock or _takes_connections
        self._lock = threading.Lock()
        self._locks: dict[Server, threading.Lock] = {}
        self._known: dict[Server, tuple[bool, float, float]] = {}
        """What came of the last try, when it began, and when that was known."""

    def open(self, server: Server) -> bool:
        """Whether it took one now, or a moment ago. Waits at most KNOCK_LIMIT, or for who asks already.

        Tries may follow each other without a pause, but who waited for one does not begin another.
        """
        asked = self._clock()
        with self._lock:
            lock = self._locks.setdefault(server, threading.Lock())
        with lock:
            known, began, ended = self._known.get(server, (False, -math.inf, -math.inf))
            now = self._clock()
            if ended < asked and now - began >= KNOWN:
                known = self._knock(server)
                self._known[server] = known, now, self._clock()
            return known


def _takes_connections(server: Server) -> bool:
    try:
        socket.create_connection(server, KNOCK_LIMIT).close()
    except OSError:
        return False
    return True


class Nudges:
    """Requests to iscsid that it do what is due, for many who ask: one in each second of the clock that it goes by."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, nudge: Callable[[], None] = nudge) -> None:
        """``clock`` in seconds."""
        self._clock = clock
        self._nudge = nudge
        self._lock = threading.Lock()
        self._last = 0

    def send(self, since: float) -> None:
        """For a session that was not logged in then. Nothing is due before the second turns."""
        with self._lock:
            second = _turned(self._clock())
            if second <= max(_turned(since), self._last):
                return
            self._last = second
        self._nudge()

    def seconds_left(self) -> float:
        """Until the next one is of use."""
        return 1 - (self._clock() - COARSE) % 1


def _turned(moment: float) -> int:
    """The second that has turned by then for iscsid, too, whose clock may be late."""
    return math.floor(moment - COARSE)


class Sessions:
    """Which images have a session that is not as it was."""

    def __init__(self, folder: Path = CLASS) -> None:
        """``folder``: where the kernel tells of sessions."""
        self._folder = folder
        self._images: dict[str, str | None] = {}
        self._disks: dict[str, str] = {}
        self._states: dict[str, tuple[str, str]] = {}
        self._files = KeptFiles()

    def changed(self) -> set[str]:
        """Since the last call. At first: all of them."""
        before, self._states = self._states, {folder: self._state(folder) for folder in self._ours()}
        self._files.keep([*map(_of_session, self._states), *self._disks.values()])
        all_of_them = before.keys() | self._states
        different = [folder for folder in all_of_them if before.get(folder) != self._states.get(folder)]
        images = {self._images[folder] for folder in different}
        for folder in before.keys() - self._states:
            self._images.pop(folder)
            self._disks.pop(folder, None)
        return {image for image in images if image is not None}

    def close(self) -> None:
        """Close what is open. The next call opens it anew."""
        self._files.close()

    def _ours(self) -> list[str]:
        """The folders of our sessions. Whose a session is does not change, once it is known."""
        found, there = [], self._all()
        for gone in self._images.keys() - there:  # another one gets its number if the modules are loaded anew
            forget(gone)
            if gone not in self._states:
                self._images.pop(gone)
        for folder in there:
            if folder not in self._images:
                with contextlib.suppress(OSError):  # it may be coming or going
                    if name := name_of(folder):
                        self._images[folder] = image_of(name)
            if self._images.get(folder) is not None:
                found.append(folder)
        return found

    def _all(self) -> set[str]:
        """The folders of all sessions; none before the kernel knows of sessions. Raises OSError."""
        try:
            with os.scandir(self._folder) as entries:
                return {entry.path for entry in entries}
        except FileNotFoundError:
            return set()

    def _state(self, folder: str) -> tuple[str, str]:
        """What is told of a session and of its disk."""
        disk = self._disks.get(folder)
        with contextlib.suppress(OSError):  # it may be going
            disk = disk or next(map(str, Path(folder).glob("device/target*/*:*/state")), None)
        state = self._word(_of_session(folder))
        if disk is None:
            return state, ""
        of_disk = self._word(disk)
        if of_disk:
            self._disks[folder] = disk
        else:
            self._disks.pop(folder, None)
        return state, of_disk

    def _word(self, file: str) -> str:
        """What a file says; nothing if it has gone."""
        try:
            return self._files.read(file).strip()
        except OSError:
            return ""


def _of_session(folder: str) -> str:
    """Where the kernel tells how a session is."""
    return f"{folder}/state"
