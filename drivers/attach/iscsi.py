"""Reach parents over iSCSI: one session per parent (open-iscsi), and one multipath map per image.

The map exists before any parent is reached. It holds requests while it has no path, and sends them by another path when
one fails. A thread per image keeps the paths in the map equal to the parents that are usable: it is woken when the map
had an event, a session changed, or a disk does not get on with its reads (drivers/iscsi/lookout.py).

A parent that does not answer reads is left, by ending its connection, once that is better (drivers/attach/doubts.py).

While all reads go to the first usable parent, the first one is logged in to before the others: hosts that start
together need one path each, soon, and a login costs both of its ends. The others follow, side by side, once the first
is in the map, or gives no sign of life.

Host and parent prove themselves to each other by CHAP (drivers/iscsi).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

from drivers.attach.doubts import Doubts
from drivers.attach.hangs import Hangs
from drivers.attach.losses import Losses
from drivers.attach.returns import Returns
from drivers.attach.routes import Routes, origin_file
from drivers.base import FAILOVER, Device, Existing, Image, LostParent, Opened, Parent, PathState, PathStatus, Place
from drivers.door import door
from drivers.errors import BadDisk, CommandFailed, DriverError, NoParents
from drivers.host.watch import Watch
from drivers.iscsi import records
from drivers.iscsi.disks import NO_ANSWER, Asking, alien, answers, flaw, lasting_number_of, number_of
from drivers.iscsi.lookout import Lookout
from drivers.iscsi.names import image_of, initiator_name, portal_of, target_name
from drivers.iscsi.paths import Paths
from drivers.iscsi.records import Target
from drivers.iscsi.sessions import (
    REFUSALS,
    UNPROVEN,
    Session,
    known_targets,
    link_to,
    log_in,
    log_out,
    sessions,
    word,
)
from drivers.kernel import devmapper, multipath, ownership, tcpsockets
from drivers.kernel.devmapper import SECTOR
from drivers.kernel.multipath import Groups, State
from drivers.needs import DEVICE_MAPPER, DMSETUP, MODPROBE, UDEVADM, Needs, Tool

log = logging.getLogger(__name__)

_MAP = "virtman-attach-"
_FIRST_RETRY, _LAST_RETRY, _LATE_RETRY = 0.2, 1.0, 10.0
_SOON = 60.0
"""Seconds after which a parent that is awaited is tried less often: with many images that adds up."""
_WATCH_INTERVAL, _LATE_INTERVAL, _CALM_INTERVAL = 1.0, 10.0, 300.0
"""Seconds between two looks of an image that waits for something, at first and at last, and of one that does not: that
is woken by events, and a look goes through all sessions of the host."""

_REFUSED_LIMIT = 2.0
"""Seconds for which iscsid may try to log in again to a parent that takes connections: it does not rest between two
tries that are refused (open-iscsi: usr/initiator.c, __session_conn_reopen)."""

HEAD_START = 30.0
"""Seconds that a host gives its first parent, which may still be making its own stack, while that one is connected."""
SIGN_OF_LIFE = 5.0
"""Seconds without a connection to the first parent, and without a refusal by it, after which it is not waited for: more
than iscsiadm needs to start on a host that makes a stack on a slow processor."""


@door
class IscsiAttach:
    """Maps ``virtman-attach-<image>``, read by the first usable parent or by all, as the path policy says."""

    needs = Needs(
        tools=(Tool("iscsiadm", "open-iscsi"), Tool("iscsid", "open-iscsi"), DMSETUP, MODPROBE, UDEVADM),
        modules=("iscsi_tcp", "dm_multipath", "dm_service_time", "dm_round_robin", "dm_queue_length", "tcp_diag"),
        nodes=(DEVICE_MAPPER,),
        root=True,
    )

    def __init__(
        self,
        place: Place,
        *,
        lost: LostParent,
        head_start: float = HEAD_START,
        hangs: Callable[[], Hangs[Target]] = Hangs,
    ) -> None:
        """``head_start``: seconds that the first parent has, if all reads go to the first. ``hangs``: for an
        image, those of its parents that hung.
        """
        ownership.claim(place.state)
        self._name, self._policy, self._lost = initiator_name(place.host), place.path_policy, lost
        self._head_start = head_start if self._policy == FAILOVER else 0.0
        self._hangs = hangs
        self._routes: Routes[_Route] = Routes()
        self._lookout = Lookout(_MAP)

    def origin(self, image: Image, file: Path | Opened) -> Device:
        """The device of a host that has the whole image in ``file``. Raises BadDisk."""
        return Device(size=image.size, path=origin_file(image, file))

    def connect(self, image: Image, parents: Sequence[Parent]) -> Device:
        """Begin to log in to the parents. Reads of the map wait for the first of them; its path never changes.

        Raises NoParents, BadAddress, BadName, BadDisk, CommandFailed, ToolMissing.
        """
        route = self._routes.find(image.name)
        if route is None:
            route = self._routes.add(
                image.name,
                _Route(
                    image,
                    parents,
                    self._policy,
                    self._table,
                    self._hangs(),
                    self._lost,
                    self._name,
                    self._head_start,
                    self._lookout,
                ),
            )
            try:
                route.start()
            except BaseException:
                self._routes.drop(image.name)  # and its threads
                raise
        else:
            route.follow(parents)
        return Device(size=image.size, path=devmapper.map_path(_MAP + image.name))

    def update(self, image: Image, parents: Sequence[Parent]) -> bool:
        """Follow a new list. False: parents that are not in it are out of the map when this returns.

        Raises NotAttached, NoParents, BadAddress, CommandFailed.
        """
        self._routes.of(image.name).follow(parents)
        return False

    def unsettled(self, image: str) -> bool:  # noqa: ARG002
        """Never: the map's paths are put in order by who watches them."""
        return False

    def abandon(self, image: str) -> None:
        """Stop watching. Reads fail that wait, in the map or at a parent. Raises BadName, NotOurs, CommandFailed."""
        route = self._routes.find(image)
        if route is not None:
            route.stop()
            try:
                self._fail(image)  # its thread may wait for them, while it gives the map other paths
            except (DriverError, OSError) as error:  # it is done once more
                log.warning("image %s: %s", image, error)
        self._routes.drop(image)
        self._fail(image)

    @staticmethod
    def _fail(image: str) -> None:
        name = _MAP + image
        if not devmapper.exists(name):
            return
        devmapper.message(name, multipath.FAILS)
        # What one parent gives back is not for the next one.
        multipath.fail(name, devmapper.numbers_in(devmapper.table(name)))
        # A parent that waits for its own answers pings but no reads. SCSI takes a minute to give up on it.
        for session in sessions(image).values():
            _cut(session)

    def disconnect(self, image: str) -> None:
        """Remove the map and all sessions and records of the image's parents. What reads from it is gone by now.

        Raises BadName, NotOurs, CommandFailed.
        """
        self.abandon(image)
        devmapper.remove(_MAP + image)
        targets = {target for target in known_targets() if image_of(target.name) == image}
        if targets:
            with ThreadPoolExecutor(len(targets)) as pool:
                list(pool.map(log_out, targets))

    def paths(self, image: str) -> list[PathStatus]:
        """The routes in the order of the parents. Raises NotAttached."""
        route = self._routes.of(image)
        usable = route.usable()
        return [PathStatus(parent, self._state(parent, usable)) for parent in route.parents()]

    def existing(self) -> Existing:
        """Images with a map, a session or a record. Raises CommandFailed, ToolMissing."""
        details = {name.removeprefix(_MAP): f"map {name}" for name in devmapper.names(_MAP)}
        others = {name.removeprefix(_MAP) for name in devmapper.others(_MAP)}
        for target in known_targets():
            image = image_of(target.name)
            if image is not None and image not in others:
                details.setdefault(image, f"parent {target.portal}")
        return Existing(frozenset(details), details)

    def close(self) -> None:
        """Stop watching, but leave maps and sessions: they go on, for the next driver object to find."""
        self._routes.close()
        self._lookout.close()

    def _state(self, parent: Parent, usable: Sequence[Parent]) -> PathState:
        if parent not in usable:
            return PathState.LOST
        return PathState.ACTIVE if parent == usable[0] or self._policy != FAILOVER else PathState.STANDBY

    def _table(self, image: Image, groups: Groups) -> str:
        return table_of(image, self._policy, groups)


class _Route:
    """One image's map, and the threads that keep it up to date: one that watches, one per parent that is not usable."""

    def __init__(
        self,
        image: Image,
        parents: Sequence[Parent],
        policy: str,
        table: Callable[[Image, Groups], str],
        hangs: Hangs[Target],
        lost: LostParent,
        initiator: str,
        head_start: float,
        lookout: Lookout,
    ) -> None:
        if image.size % SECTOR:
            raise BadDisk(f"image {image.name}: {image.size} bytes are not whole sectors")
        self._image, self._policy, self._table, self._lost, self._initiator = image, policy, table, lost, initiator
        self.image, self.map = image.name, _MAP + image.name
        self._lookout = lookout
        self._targets = _targets(image, parents)
        self._looking = threading.RLock()
        """One look at a time: it may wait for reads that are under way, and for as long nobody else is to."""
        self._lock = threading.Lock()
        """Of who is up and who was lost."""
        self._stopped = threading.Event()
        self._hiring = threading.Lock()
        self._workers: dict[Target, Watch] = {}
        found = devmapper.exists(self.map)
        self._began = self._heard = time.monotonic()
        """When the map was made, and when a parent last refused this host."""
        self._head_start = 0.0 if found else head_start
        """Seconds from the beginning, at most, in which only the first parent is logged in to; 0 once that is over."""
        self._said: Groups = []
        """The good paths, as the log has them."""
        self._behind = False
        """Whether the map may have others than the list of parents wants."""
        self._up: set[Target] = set()
        self._hangs = hangs
        self._paths = Paths(lookout)
        self._doubts = Doubts(image.name, self._paths, self, self._hangs, self._stopped.wait)
        self._settled = False
        """Whether nothing is waited for."""
        self._seen: tuple[Parent, ...] = ()
        self._usable: list[Parent] = []
        """The parents, and which of them are up, for who asks."""
        self._asking = Asking()
        self._returns = Returns()
        self._again: set[str] = set()
        """Disks that have failed in the map, and are to be read by again as the parents' order says."""
        self._refused_since: dict[Target, float] = {}
        """Targets whose sessions are not logged in though they take connections, and since when."""
        self._losses: Losses[Parent] = Losses()
        devmapper.create(self.map, [table(image, [])], read_only=True)
        if found:
            self._find_paths()
        self._show()
        self._woken = threading.Event()
        self._news = threading.Event()
        """Set when something has happened, and replaced by another one."""
        self._thread = Watch(f"parents-of-{image.name}", self._watch, self._stopped)

    def start(self) -> None:
        """Look for the parents now, and from now on. Raises DriverError, OSError."""
        self._lookout.add(self)  # the first change of the map waits for a parent that hangs, too
        self._look()
        self._thread.start()

    def _find_paths(self) -> None:
        """An earlier driver object's paths are good until they fail."""
        table = devmapper.table(self.map)
        loaded = devmapper.numbers_in(table)
        if multipath.HOLDS not in table:  # it was abandoned
            devmapper.message(self.map, multipath.HOLDS)
            multipath.reinstate(self.map, loaded)
        paths = multipath.state(self.map)
        self._said = paths.without(paths.failed)
        there = sessions(self._image.name)
        found = {number_of(session, self._image): target for target, session in there.items()}
        self._paths.add({number: target for number, target in found.items() if number in loaded})
        self._up = set(self._targets.values()) & set(self._paths.disks.values())

    def follow(self, parents: Sequence[Parent]) -> None:
        """See IscsiAttach.update."""
        targets = _targets(self._image, parents)
        with self._looking:
            if list(targets.items()) == list(self._targets.items()) and not self._behind:
                return
            self._targets, self._behind = targets, True  # if the look fails, the same list is followed again
            self._losses.keep(targets)
            with self._lock:
                self._show()
            self._look()
            if not self._settled:
                self._woken.set()  # who watches may rest for long
        self._tell()

    def parents(self) -> list[Parent]:
        """In the order of the list."""
        return list(self._seen)

    def usable(self) -> list[Parent]:
        """Those with a path in the map, in the order in which it reads by them."""
        return self._usable

    def _show(self) -> None:
        """What others see of the parents is what is known now. Called with ``_lock`` held."""
        self._seen = tuple(self._targets)
        parents = {target: parent for parent, target in self._targets.items()}
        self._usable = [parents[target] for target in self._hangs.in_order(parents) if target in self._up]

    def stop(self) -> None:
        """Have its threads end, which may wait for reads."""
        self._lookout.remove(self)
        self._stopped.set()
        self.wake()

    def close(self) -> None:
        """Stop watching; map and sessions stay. Not to be called from the LostParent callback."""
        self.stop()
        with self._hiring:
            threads = [self._thread, *self._workers.values()]
        for thread in threads:
            if thread.is_alive():
                thread.join()

    # What is called from the lookout

    @property
    def numbers(self) -> Collection[str]:
        """See Watched."""
        return self._paths.disks.keys()

    def wake(self) -> None:
        """Have the paths looked at, and parents tried at once whose sessions are not well."""
        self._woken.set()
        news, self._news = self._news, threading.Event()
        news.set()

    def stands_still(self, number: str) -> None:
        """Have a parent doubted, unless it is."""
        target = self._paths.disks.get(number)
        if target is not None:
            self._work(target, self._doubts.resolve)

    # What is called by who doubts a parent (drivers/attach/doubts.py)

    def paths(self) -> Sequence[Target]:
        """See Leaving."""
        return [target for target in self._hangs.in_order(self._targets.values()) if target in self._up]

    def leave(self, parent: Target, *, silent: bool) -> None:
        """See Leaving: the map sends its requests by another path at once."""
        if silent and (left := self._parent_of(parent)) is not None:
            self._losses.note_silent(left)
        try:
            self._paths.end(parent)
        except OSError as error:  # a kernel that cannot
            log.warning("image %s: ending the connection to %s: %s", self.image, parent, error)
            self._log_out(parent)

    # The watching thread

    def _watch(self) -> None:
        pause = _WATCH_INTERVAL
        while not self._stopped.is_set():
            self._woken.clear()
            try:
                self._look()
            except (DriverError, OSError) as error:
                self._settled = False
                log.warning("image %s: looking after its paths: %s", self._image.name, error)
            self._tell()
            if self._woken.wait(self._calm() if self._settled else pause) or self._head_start > 0:
                pause = _WATCH_INTERVAL
            else:
                pause = min(2 * pause, _LATE_INTERVAL)

    def _calm(self) -> float:
        """Seconds until an image that waits for nothing is looked at again: the end of a parent's rest is no event."""
        return min(_CALM_INTERVAL, self._hangs.next_end())

    def _look(self) -> None:
        """Make the map's paths the usable parents, have the others brought up, and note those just lost."""
        with self._looking:
            with self._lock:
                up, paths = set(self._up), multipath.state(self.map)
                self._again &= paths.failed
            there = sessions(self._image.name)
            disks: dict[Target, str] = {}
            waiting: dict[str, Target] = {}
            first = next(iter(self._targets.values()))
            first_only = self._has_head_start(first)
            for parent, target in self._targets.items():
                session = there.get(target)
                number = number_of(session, self._image)
                if target in up and number is not None and number not in paths.failed - self._again:
                    disks[target] = number
                    continue
                if (number := lasting_number_of(session, self._image)) is not None:
                    waiting[number] = target
                if target in up:
                    self._note_lost(parent, target)
                if not first_only or target is first:
                    self._work(target, self._bring_up)
            wanted = set(self._targets.values())
            with self._lock:
                self._up &= wanted
                self._show()
                # The load waits for reads by all of them, and one may hang.
                self._paths.add({number: target for target, number in disks.items()})
            in_order = self._hangs.in_order(disks)
            resting = sum(map(self._hangs.rests, in_order))
            self._read_by(groups_of(self._policy, [disks[target] for target in in_order], resting), waiting, paths)
            left = there.keys() - wanted
            for target in left:
                self._work(target, self._let_go)
            with self._lock:
                # Also those of who came meanwhile.
                self._paths.keep(lambda number, target: target in self._up and disks.get(target, number) == number)
                self._settled = self._up == wanted == disks.keys() and not left
            self._behind = False

    def _note_lost(self, parent: Parent, target: Target) -> None:
        with self._lock:
            if target not in self._up:
                return
            self._up.discard(target)
            self._losses.note(parent)
        log.warning("image %s: parent %s lost", self._image.name, parent.host)

    def _has_head_start(self, first: Target) -> bool:
        """Whether the other parents are not logged in to yet."""
        if self._head_start <= 0 or self._up:
            self._head_start = 0.0
            return False
        now = time.monotonic()
        if now - self._began >= self._head_start or (now - self._heard >= SIGN_OF_LIFE and not _connected(first)):
            log.info("image %s: no path by %s: logging in to all parents", self._image.name, first.portal)
            self._head_start = 0.0
        return self._head_start > 0

    def _read_by(self, groups: Groups, waiting: Mapping[str, Target], paths: State) -> None:
        """Have the map read by these disks, as soon as it can.

        ``waiting`` are not read by until they are up, and stay in it as long as that needs no other table: that waits
        for all reads below it, and more than one parent may have gone silent. ``paths``: how it reads now.
        """
        numbers = dict.fromkeys(chain.from_iterable(groups)).keys()
        if groups != self._said:
            log.info("image %s: paths are now %s", self._image.name, ", ".join(numbers) or "none; reads wait")
            self._said = groups
        if paths.without(waiting) != groups:
            devmapper.reload(self.map, [self._table(self._image, groups)], read_only=True)
        else:
            loaded = set(chain.from_iterable(paths.groups))
            with self._lock:  # one that is up by now is read by again
                down = {number for number, target in waiting.items() if target not in self._up}
                multipath.fail(self.map, down & loaded - paths.failed)
            multipath.reinstate(self.map, numbers & paths.failed)
            first = paths.first_without(waiting)
            if first not in (0, paths.group):  # else it would stay with the next best
                multipath.switch_to(self.map, first)
        with self._lock:
            self._again -= numbers

    def _tell(self) -> None:
        for parent in self._losses.take_due():
            try:
                self._lost(self._image, parent)
            except Exception:  # whatever the agent's side does, the paths have to be watched on
                log.exception("image %s: telling that parent %s is lost failed", self._image.name, parent.host)

    # The threads of single parents

    def _work(self, target: Target, act: Callable[[Target], None]) -> None:
        """Start a parent's thread, unless it has one."""
        with self._hiring:
            worker = self._workers.get(target)
            if not self._stopped.is_set() and (worker is None or not worker.is_alive()):
                self._workers[target] = Watch(target.name, partial(act, target), self._stopped)
                self._workers[target].start()

    def _bring_up(self, target: Target) -> None:
        """Log in and wait for the disk, with a bounded back-off, while the parent is wanted."""
        began, pause, said = time.monotonic(), _FIRST_RETRY, ""
        while True:
            news = self._news  # before what it may tell of
            if self._stopped.is_set() or (wanted := self._wanted(target)) is None:
                self._refused_since.pop(target, None)
                return
            trouble = self._try(wanted)
            if not trouble:
                self._is_up(wanted)
                return
            if trouble == NO_ANSWER:
                self._head_start = 0.0  # it may wait for parents of its own, and others not
            if trouble != said:
                log.info("image %s: waiting for %s: %s", self._image.name, target.name, trouble)
            said = trouble
            # Without a session nothing tells when it is time again.
            (news if self._has_session(target) else self._stopped).wait(min(pause, self._seconds_left(target)))
            pause = min(2 * pause, _LAST_RETRY if time.monotonic() - began < _SOON else _LATE_RETRY)

    def _seconds_left(self, target: Target) -> float:
        """At most until the next try. A session that is refused is nudged as each second turns.

        Nor is it ended in between: it may be about to be taken. That made pauses of the network last seconds longer.
        """
        return self._lookout.nudges.seconds_left() if target in self._refused_since else _LATE_RETRY

    def _is_up(self, target: Target) -> None:
        """Have it taken into the map, which may wait for a parent that hangs: for this one that is left at once.

        It is read by at once if it is in the map still, unless it is to come behind others first.
        """
        number = number_of(sessions(self._image.name).get(target), self._image)
        with self._lock:
            if number is not None:
                self._reinstate(number, target)
            self._up.add(target)
            if (back := self._parent_of(target)) is not None:
                self._losses.note_back(back)
            self._show()
            if number is not None:
                self._paths.replace(target, number)
        self.wake()

    def _has_failed(self, number: str) -> bool:
        """Whether a disk is in the map, which does not read by it any more."""
        return number in multipath.state(self.map).failed

    def _reinstate(self, number: str, target: Target) -> None:
        """Read by a disk again, or have the next look see to that. Called with ``_lock`` held."""
        self._again.add(number)
        try:
            if not self._hangs.rests(target):
                if self._has_failed(number):
                    multipath.reinstate(self.map, [number])
                self._again.discard(number)  # if it fails from now on it has to answer first
        except (DriverError, OSError) as error:  # the map gets another table just now, say
            log.debug("image %s: reading by %s again: %s", self.image, number, error)

    def _has_session(self, target: Target) -> bool:
        """Also one that is not well; no if that cannot be told."""
        try:
            return target in sessions(self._image.name)
        except OSError:
            return False

    def _parent_of(self, target: Target) -> Parent | None:
        return next((parent for parent, wanted in self._targets.items() if wanted == target), None)

    def _wanted(self, target: Target) -> Target | None:
        """The target as the list of parents has it now: its secret may be another one. None: it is not in the list."""
        return next((wanted for wanted in self._targets.values() if wanted == target), None)

    def _try(self, target: Target) -> str:
        """What keeps the parent from being usable; nothing if it is."""
        try:
            session = sessions(self._image.name).get(target)
            if session is None:
                self._refused_since.pop(target, None)
                log_in(target, self._initiator)
                session = sessions(self._image.name).get(target)
            if session is None or not session.logged_in:
                return self._not_logged_in(target, session)
            self._refused_since.pop(target, None)
            session.fail_fast()
            disk = session.disk()
            if disk is None:
                session.scan()
                disk = session.disk()
            if disk is None:
                return "no disk yet"
            return self._flaw(target, disk)
        except CommandFailed as error:
            if error.code == UNPROVEN:
                self._head_start = 0.0  # nor does waiting make it another one
            elif error.code in REFUSALS:
                self._heard = time.monotonic()
            return REFUSALS.get(error.code, str(error))
        except (DriverError, OSError) as error:
            return str(error)

    def _flaw(self, target: Target, disk: Path) -> str:
        """What keeps its disk from being a path. Raises OSError."""
        if alien(disk, self._image):
            self._head_start = 0.0  # no waiting makes it a path
            self._asking.ask(target, disk)
        if trouble := flaw(disk, self._image):
            return trouble
        return "" if self._is_taken_back(target, disk) or answers(disk) else NO_ANSWER

    def _is_taken_back(self, target: Target, disk: Path) -> bool:
        """Whether it need not answer a read first (drivers/attach/returns.py). Raises OSError."""
        if len(self._targets) > 1:
            self._returns.forget()
            return False
        # A read that the map sends once more counts as none until it is answered.
        answered = int(devmapper.counted(self.map)[0])
        return self._returns.is_trusted(link_to(target), answered) and self._has_failed(word(f"{disk}/dev"))

    def _not_logged_in(self, target: Target, session: Session | None) -> str:
        """iscsid logs in again by the record that the session began with, but not for ever to one that refuses it.

        Raises DriverError, OSError.
        """
        if not records.recorded_as(target, self._initiator):
            log_out(target)
            return "the session has another secret, or is of an earlier release: it begins anew"
        if not self._lookout.knocks.open((target.ip, target.port)):
            self._refused_since.pop(target, None)
        elif time.monotonic() - (since := self._refused_since.setdefault(target, time.monotonic())) >= _REFUSED_LIMIT:
            self._refused_since.pop(target, None)
            log_out(target)  # from now on it is tried from here, with a pause
            return "it takes connections and no login: it begins anew"
        elif session is not None:
            self._lookout.nudges.send(since)
        return "not logged in"

    def _let_go(self, target: Target) -> None:
        if self._wanted(target) is None:  # else it is again
            self._log_out(target)

    def _log_out(self, target: Target) -> None:
        try:
            log_out(target)
        except (DriverError, OSError) as error:  # the next look begins anew
            log.warning("image %s: leaving %s: %s", self._image.name, target.name, error)


def groups_of(policy: str, numbers: Sequence[str], resting: int) -> Groups:
    """How a map is to read by these disks. The parents of so many at their end rest: they come after all others."""
    if policy == FAILOVER:
        return [[number] for number in numbers]
    awake = len(numbers) - resting
    return [list(part) for part in (numbers[:awake], numbers[awake:]) if part]


def table_of(image: Image, policy: str, groups: Groups) -> str:
    """Reads by these disks (Linux: admin-guide/device-mapper; drivers/md/dm-mpath.c, parse_priority_group)."""
    selector = "service-time" if policy == FAILOVER else policy
    told = [f"{selector} 0 {len(group)} 0 {' '.join(group)}" for group in groups]
    counts = f"{len(groups)} {min(1, len(groups))}"
    return " ".join([f"0 {image.size // SECTOR} multipath 1 {multipath.HOLDS} 0 {counts}", *told])


def _targets(image: Image, parents: Sequence[Parent]) -> dict[Parent, Target]:
    """The parents in their order with where they serve the image. Raises NoParents, BadAddress, BadName."""
    if not parents:
        raise NoParents(image.name)
    return {
        parent: Target(target_name(parent.host, image.name), *portal_of(parent.address), parent.secret)
        for parent in parents
    }


def _cut(session: Session) -> None:
    try:
        session.cut()
    except OSError as error:
        log.debug("ending the connection to %s: %s", session.target.portal, error)  # there may be none


def _connected(target: Target) -> bool:
    try:
        return tcpsockets.connected(target.ip, target.port)
    except OSError as error:
        log.debug("asking for the connections to %s: %s", target.portal, error)
        return False
