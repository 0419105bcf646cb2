"""The way of one image to its parents: which parents are read by, and in which order.

A parent is ``AWAY`` until it has answered a read, then ``READY``, and ``USED`` once the map reads by its disk. A check
compares the list of parents with the sessions and the map, and takes the next step. A check follows each event, and is
due when the next step is. What takes long, as a login does, a thread of the parent does.

With the path policy ``failover`` the first parent is logged in to before the others: hosts that start together need one
path each, soon, and a login costs both of its ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from drivers.attach.iscsihealth import HealthCheck
from drivers.attach.iscsimap import ParentsMap
from drivers.attach.iscsimonitor import Monitor
from drivers.attach.quarantine import Quarantine
from drivers.base import FAILOVER, Image, LostParent, Parent, PathState, PathStatus
from drivers.errors import CommandFailed, DriverError, NoParents
from drivers.host.retry import Backoff
from drivers.host.watch import Watch
from drivers.iscsi.disks import NOT_RUNNING, READ_WAITS, answers, number_of, readable_number_of, unfit
from drivers.iscsi.names import portal_of, target_name
from drivers.iscsi.records import Target
from drivers.iscsi.sessions import REFUSALS, REFUSED, Session, log_in, log_out, sessions

log = logging.getLogger(__name__)

_FIRST_RETRY, _LONGEST_RETRY = 0.2, 10.0
_NEXT_STEP, _CALM = 1.0, 300.0
"""Seconds until the next check, unless an event comes first: after a check that began a step or failed, and at most."""

_NO_DISK, _NO_ANSWER = "it has no disk yet", "its disk does not answer reads"
_STARTING = ("", REFUSED, _NO_DISK, NOT_RUNNING, READ_WAITS)
"""What may be said of a first parent that still makes its own stack."""


@dataclass(frozen=True)
class Host:
    """What all images of a host share. ``policy``: see ``Place.path_policy``; ``patience``: see PATIENCE."""

    initiator: str
    policy: str
    lost: LostParent
    patience: float
    monitor: Monitor


class Phase(Enum):
    """How far a parent is."""

    AWAY = "away"
    READY = "ready"
    USED = "used"


@dataclass(eq=False)
class _Path:
    """One parent. Times are of the monotonic clock."""

    target: Target
    phase: Phase = Phase.AWAY
    since: float = field(default_factory=time.monotonic)
    """When the parent's last login began, or when the parent went away."""
    trouble: str = ""
    """Why the last try failed."""
    retry: Backoff = field(default_factory=lambda: Backoff(_FIRST_RETRY, _LONGEST_RETRY))
    lost: float | None = None
    """When a parent that was used went away, until Volt is told."""


class _Jobs:
    """Threads of an image, at most one for each parent."""

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped, self._lock = stopped, threading.Lock()
        self._threads: dict[Target, Watch] = {}

    def start(self, target: Target, act: Callable[[], None]) -> None:
        """Start a parent's thread, unless the parent has one. Raises OSError."""
        with self._lock:
            thread = self._threads.get(target)
            if not self._stopped.is_set() and (thread is None or not thread.is_alive()):
                self._threads[target] = Watch(target.name, act, self._stopped)
                self._threads[target].start()

    def join(self) -> None:
        with self._lock:
            alive = [thread for thread in self._threads.values() if thread.is_alive()]
        for thread in alive:
            thread.join()


class Route:
    """One image."""

    def __init__(self, image: Image, parents: Sequence[Parent], host: Host) -> None:
        """Make the map, or find what an earlier driver object made. Raises NoParents, BadAddress, BadDisk, ..."""
        self.image, self._host = image, host
        self._paths = {parent: _Path(target) for parent, target in _targets(image, parents).items()}
        self._checking = threading.RLock()
        """One check at a time: a check may wait for reads below the map."""
        self._stopped, self._woken = threading.Event(), threading.Event()
        self._quarantine: Quarantine[Target] = Quarantine()
        self._health = HealthCheck(image, host.monitor, self._quarantine)
        self._jobs = _Jobs(self._stopped)
        self.settled = False
        """Whether all parents are used, and no other has a session."""
        self._next = 0.0
        """When the next check is due."""
        self._map = ParentsMap(image, host.policy)
        is_new = not self._map.open()
        self._alone_until = time.monotonic() + host.patience * (is_new and host.policy == FAILOVER)
        """Until when only the first parent is logged in to."""
        self._thread = Watch(f"parents-of-{image.name}", self._watch, self._stopped)

    def start(self) -> None:
        """Look for the parents now, and from now on. Raises DriverError, OSError."""
        self._host.monitor.add(self)  # first: also the first check may wait for a parent that hangs
        self._check()
        self._thread.start()

    def follow(self, parents: Sequence[Parent]) -> None:
        """Follow a new list: other parents are out of the map when this returns. Raises DriverError, OSError."""
        targets = _targets(self.image, parents)
        with self._checking:
            known = {path.target: path for path in self._paths.values()}
            paths = {parent: known.get(target) or _Path(target) for parent, target in targets.items()}
            for parent, path in paths.items():
                path.target = targets[parent]  # its secret may be another one
            self._paths = paths
            self._check()
        self._woken.set()  # the watching thread may sleep for long

    def statuses(self) -> list[PathStatus]:
        """The parents in the order of the list. Does not wait for a check."""
        paths = self._paths
        used = [path for path in paths.values() if path.phase is Phase.USED]
        first = min(used, key=lambda path: self._quarantine.holds(path.target), default=None)

        def state(path: _Path) -> PathState:
            if path.phase is not Phase.USED:
                return PathState.LOST
            return PathState.ACTIVE if path is first or self._host.policy != FAILOVER else PathState.STANDBY

        return [PathStatus(parent, state(path)) for parent, path in paths.items()]

    def stop(self) -> None:
        """Have the threads end, which may wait for reads."""
        self._host.monitor.remove(self)
        self._stopped.set()
        self._woken.set()

    def close(self) -> None:
        """Stop watching; map and sessions stay. Not to be called from the LostParent callback."""
        self.stop()
        self._jobs.join()
        if self._thread.is_alive():
            self._thread.join()

    # What the monitor asks and calls: all of it returns at once
    @property
    def map(self) -> str:
        return self._map.name

    @property
    def disks(self) -> Collection[str]:
        """The disks of the image's sessions, ``major:minor``."""
        return self._health.disks.keys()

    def wake(self) -> None:
        """Look soon: the map had an event, say."""
        self._woken.set()

    def note_logins(self) -> None:
        """A session was logged in, or is not any more: try all parents at once."""
        for path in self._paths.values():
            path.retry.reset()
        self.wake()

    def note_stall(self, number: str) -> None:
        """A disk is stalled: check its parent. Only probes read by a parent that is away. Raises OSError."""
        target = self._health.disks.get(number)
        away = {path.target for path in self._paths.values() if path.phase is Phase.AWAY}
        if target is not None and target not in away:
            self._jobs.start(target, partial(self._health.check, target))

    # The watching thread

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._woken.clear()
            try:
                self._check()
            except (DriverError, OSError) as error:
                self.settled, self._next = False, time.monotonic() + _NEXT_STEP
                log.warning("image %s: checking its paths: %s", self.image.name, error)
            self._tell_losses()
            self._woken.wait(max(0, self._next - time.monotonic()))

    def _check(self) -> None:
        """Take the next step to a map that is read by all parents that can be read."""
        with self._checking:
            now = time.monotonic()
            there, good = sessions(self.image.name), self._map.state().good
            wanted = {path.target for path in self._paths.values()}
            disks = {number: target for target in there if (number := number_of(there[target], self.image))}
            self._health.parents, self._health.disks = wanted, disks
            ready: dict[Target, str] = {}
            for parent, path in self._paths.items():
                number = readable_number_of(there.get(path.target), self.image)
                if number in good:  # an earlier driver object's paths are used until they fail
                    path.phase = Phase.USED
                elif path.phase is Phase.USED:
                    self._lose(parent, path)
                if number is None:
                    path.phase = Phase.AWAY
                elif path.phase is not Phase.AWAY:
                    ready[path.target] = number
            due = self._log_in_to_others(there, now)
            self._read_by(ready)
            for target in there.keys() - wanted:
                self._jobs.start(target, partial(self._end, target))
                due.append(now + _NEXT_STEP)
            self.settled = there.keys() == wanted == ready.keys()
            self._next = min([*due, *self._quarantine.ends(), now + _CALM])

    def _lose(self, parent: Parent, path: _Path) -> None:
        path.phase, path.trouble = Phase.AWAY, ""
        path.since = path.lost = time.monotonic()
        path.retry.reset()
        log.warning("image %s: parent %s lost", self.image.name, parent.host)

    def _log_in_to_others(self, there: Mapping[Target, Session], now: float) -> list[float]:
        """Start the tries that are due at parents that are away. Returns when something is due next."""
        away = [path for path in self._paths.values() if path.phase is Phase.AWAY]
        due = [path.lost + self._host.patience for path in away if path.lost is not None]
        first = next(iter(self._paths.values()))
        if self._is_first_alone(first, now):
            away = [path for path in away if path is first]
            due.append(now if first.phase is Phase.READY else self._alone_until)
        for path in away:
            session = there.get(path.target)
            # open-iscsi is about to log in again, which the monitor sees.
            waits = session is not None and not session.logged_in
            at = path.since + self._host.patience if waits else path.retry.due
            if at <= now:
                self._jobs.start(path.target, partial(self._try, path))
            due.append(at if at > now else now + _NEXT_STEP)
        return due

    def _is_first_alone(self, first: _Path, now: float) -> bool:
        """Whether the other parents are not logged in to yet. Hosts that start together need one path each, soon."""
        if now < self._alone_until and (first.phase is Phase.USED or first.trouble not in _STARTING):
            self._alone_until = now
        return now < self._alone_until

    def _read_by(self, ready: Mapping[Target, str]) -> None:
        """Have the map read by these disks. Raises DriverError, OSError."""
        in_order = self._quarantine.in_order(ready)
        away = self._health.parents - ready.keys()
        kept = [number for number, target in self._health.disks.items() if target in away]
        last = sum(map(self._quarantine.holds, in_order))
        self._map.read_by([ready[target] for target in in_order], last, kept)
        for path in self._paths.values():
            if path.target in ready:
                path.phase, path.lost = Phase.USED, None

    def _tell_losses(self) -> None:
        """Tell of the parents that have been away for long: a pause of the network is nothing to tell Volt of."""
        for parent, path in list(self._paths.items()):
            if path.lost is not None and time.monotonic() - path.lost >= self._host.patience:
                path.lost = None
                try:
                    self._host.lost(self.image.name, parent.host)
                except Exception:  # whatever the agent's side does, the paths have to be watched
                    log.exception("image %s: telling that parent %s is lost failed", self.image.name, parent.host)

    # The threads of single parents

    def _try(self, path: _Path) -> None:
        """Bring a parent one step nearer to be read by."""
        try:
            trouble = self._bring_up(path)
        except CommandFailed as error:
            trouble = REFUSALS.get(error.code, str(error))
        except (DriverError, OSError) as error:
            trouble = str(error)
        if trouble:
            path.retry.note_failure()
        else:
            path.phase = Phase.READY
        if trouble not in ("", path.trouble):
            log.info("image %s: waiting for %s: %s", self.image.name, path.target.name, trouble)
        path.trouble = trouble
        self.wake()

    def _bring_up(self, path: _Path) -> str:
        """Log in and find the disk. Returns why the parent cannot be read by; nothing if it can."""
        target = path.target
        session = sessions(self.image.name).get(target)
        if session is not None and time.monotonic() - path.since >= self._host.patience:
            log_out(target)  # the next session has the present secret, and asks anew what the disk is
            session = None
        if session is None:
            path.since = time.monotonic()
            log_in(target, self._host.initiator)
            session = sessions(self.image.name).get(target)
        if session is None or not session.logged_in:
            return "it is not logged in"
        session.fail_fast()
        disk = session.disk()
        if disk is None:
            session.scan()
            disk = session.disk()
        if disk is None:
            return _NO_DISK
        return unfit(disk, self.image) or ("" if answers(disk) else _NO_ANSWER)

    def _end(self, target: Target) -> None:
        """End the session with a parent that is wanted no more."""
        try:
            if target not in self._health.parents:
                log_out(target)
        except (DriverError, OSError) as error:  # the next check tries again
            log.warning("image %s: logging out of %s: %s", self.image.name, target.name, error)


def _targets(image: Image, parents: Sequence[Parent]) -> dict[Parent, Target]:
    """The parents in their order with where they serve the image. Raises NoParents, BadAddress, BadName."""
    if not parents:
        raise NoParents(image.name)
    return {
        parent: Target(target_name(parent.host, image.name), *portal_of(parent.address), parent.secret)
        for parent in parents
    }
