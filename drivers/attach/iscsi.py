"""Reach parents over iSCSI: one session per parent (open-iscsi), and one multipath map per image.

The map exists before any parent is reached. It holds requests while it has no path, and sends them by another path when
one fails. A thread per image keeps the paths in the map equal to the parents that are usable: it wakes at every
device-mapper event, and once a second looks for sessions that broke while nobody read. Several times a second it asks
the kernel for parents that do not even acknowledge what TCP sends them, and ends their connections: iSCSI's own watch
counts whole seconds.

While all reads go to the first usable parent, the first one is logged in to before the others: hosts that start
together need one path each, soon, and a login costs both of its ends. The others follow, side by side, once the first
is in the map, or gives no sign of life.

Host and parent prove themselves to each other by CHAP (drivers/iscsi).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from drivers.attach.routes import Routes, origin_file
from drivers.base import FAILOVER, Device, Existing, Image, LostParent, Parent, PathState, PathStatus, Place
from drivers.door import door
from drivers.errors import BadDisk, CommandFailed, DriverError, NoParents
from drivers.host.watch import Watch
from drivers.iscsi.disks import Asking, alien, flaw, number_of
from drivers.iscsi.names import image_of, initiator_name, portal_of, target_name
from drivers.iscsi.records import Target
from drivers.iscsi.sessions import REFUSALS, known_targets, log_in, log_out, sessions
from drivers.kernel import devmapper, ownership, tcpsockets
from drivers.kernel.alarm import Alarm
from drivers.kernel.devmapper import SECTOR
from drivers.needs import DEVICE_MAPPER, DMSETUP, MODPROBE, UDEVADM, Needs, Tool

log = logging.getLogger(__name__)

_MAP = "virtman-attach-"
_FIRST_RETRY, _LAST_RETRY = 0.2, 1.0
_WATCH_INTERVAL, _SILENCE_INTERVAL = 1.0, 0.25
_SILENCE = 1.0
"""Seconds without a sign from a parent until it is left, if there is another one."""

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
        modules=("iscsi_tcp", "dm_multipath", "dm_service_time", "dm_round_robin", "dm_queue_length"),
        nodes=(DEVICE_MAPPER,),
        root=True,
    )

    def __init__(self, place: Place, *, lost: LostParent, head_start: float = HEAD_START) -> None:
        """``head_start``: seconds that the first parent has, if all reads go to the first."""
        ownership.claim(place.state)
        self._name, self._policy, self._lost = initiator_name(place.host), place.path_policy, lost
        self._head_start = head_start if self._policy == FAILOVER else 0.0
        self._routes: Routes[_Route] = Routes()

    def origin(self, image: Image, file: Path) -> Device:
        """The device of a host that has the whole image in ``file``. Raises BadDisk."""
        return Device(size=image.size, path=origin_file(image, file))

    def connect(self, image: Image, parents: Sequence[Parent]) -> Device:
        """Begin to log in to the parents. Reads of the map wait for the first of them; its path never changes.

        Raises NoParents, BadAddress, BadName, BadDisk, CommandFailed, ToolMissing.
        """
        route = self._routes.find(image.name)
        if route is None:
            route = self._routes.add(
                image.name, _Route(image, parents, self._table, self._lost, self._name, self._head_start)
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

    def abandon(self, image: str) -> None:
        """Stop watching. Reads fail that wait in the map for a parent. Raises BadName, NotOurs, CommandFailed."""
        self._routes.drop(image)
        if devmapper.exists(_MAP + image):
            devmapper.message(_MAP + image, "fail_if_no_path")

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

    def _state(self, parent: Parent, usable: Sequence[Parent]) -> PathState:
        if parent not in usable:
            return PathState.LOST
        return PathState.ACTIVE if parent == usable[0] or self._policy != FAILOVER else PathState.STANDBY

    def _table(self, image: Image, numbers: Sequence[str]) -> str:
        """Reads by these disks (Linux: admin-guide/device-mapper; drivers/md/dm-mpath.c, parse_priority_group)."""
        if self._policy == FAILOVER:
            groups = [f"service-time 0 1 0 {number}" for number in numbers]
        else:
            groups = [f"{self._policy} 0 {len(numbers)} 0 {' '.join(numbers)}"] if numbers else []
        counts = f"{len(groups)} {min(1, len(groups))}"
        return " ".join([f"0 {image.size // SECTOR} multipath 1 queue_if_no_path 0 {counts}", *groups])


class _Route:
    """One image's map, and the threads that keep it up to date: one that watches, one per parent that is not usable."""

    def __init__(
        self,
        image: Image,
        parents: Sequence[Parent],
        table: Callable[[Image, Sequence[str]], str],
        lost: LostParent,
        initiator: str,
        head_start: float,
    ) -> None:
        if image.size % SECTOR:
            raise BadDisk(f"image {image.name}: {image.size} bytes are not whole sectors")
        self._image, self._table, self._lost, self._initiator = image, table, lost, initiator
        self._map = _MAP + image.name
        self._targets = _targets(image, parents)
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._workers: dict[Target, Watch] = {}
        found = devmapper.exists(self._map)
        self._began = self._heard = time.monotonic()
        """When the map was made, and when a parent last refused this host."""
        self._head_start = 0.0 if found else head_start
        """Seconds from the beginning, at most, in which only the first parent is logged in to; 0 once that is over."""
        self._events = -1 if found else 0
        """How many the map had had when its paths were asked for last."""
        self._loaded: list[str] | None = []
        """The numbers in the map; None while it may have others than the list of parents wants."""
        self._up: set[Target] = set()
        self._seen: tuple[tuple[Parent, bool], ...] = ()
        """The parents, and whether they are up, for who must not wait: the lock is held while the map gets its paths,
        which waits for the reads that are under way by others."""
        self._asking = Asking()
        self._untold: list[Parent] = []
        """Parents that were lost and nobody was told of."""
        devmapper.create(self._map, [table(image, [])], read_only=True)
        if found:
            self._find_paths()
        self._show()
        self._alarm = Alarm()
        self._thread = Watch(f"parents-of-{image.name}", self._watch, self._stopped)

    def start(self) -> None:
        """Look for the parents now, and from now on. Raises DriverError, OSError."""
        self._look()
        self._thread.start()

    def _find_paths(self) -> None:
        """An earlier driver object's paths are good until they fail."""
        devmapper.message(self._map, "queue_if_no_path")  # it may have been abandoned
        self._loaded = devmapper.numbers_in(devmapper.table(self._map))
        there = sessions()
        numbers = {target: number_of(there.get(target), self._image) for target in self._targets.values()}
        self._up = {target for target, number in numbers.items() if number in self._loaded}

    def follow(self, parents: Sequence[Parent]) -> None:
        """See IscsiAttach.update."""
        targets = _targets(self._image, parents)
        with self._lock:
            if list(targets.items()) == list(self._targets.items()) and self._loaded is not None:
                return
            self._targets, self._loaded = targets, None  # if the look fails, the same list is followed again
            self._show()
            self._look()
        self._tell()

    def parents(self) -> list[Parent]:
        """In the order of the list."""
        return [parent for parent, _ in self._seen]

    def usable(self) -> list[Parent]:
        """Those with a path in the map, in order."""
        return [parent for parent, up in self._seen if up]

    def _show(self) -> None:
        """What others see of the parents is what is known now. Called with the lock held."""
        self._seen = tuple((parent, target in self._up) for parent, target in self._targets.items())

    def close(self) -> None:
        """Stop watching; map and sessions stay. Not to be called from the LostParent callback."""
        self._stopped.set()
        self._alarm.ring()
        with self._lock:
            threads = [self._thread, *self._workers.values()]
        for thread in threads:
            if thread.is_alive():
                thread.join()
        self._alarm.close()

    # The watching thread

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._alarm.arm()
            try:
                self._look()
            except (DriverError, OSError) as error:
                log.warning("image %s: looking after its paths: %s", self._image.name, error)
            self._tell()
            for _ in range(int(_WATCH_INTERVAL / _SILENCE_INTERVAL)):
                if self._alarm.wait(_SILENCE_INTERVAL):
                    break
                self._leave_silent()

    def _leave_silent(self) -> None:
        """End the connections of silent parents, so that the map sends their requests by another path at once."""
        with self._lock:
            portals = {(target.ip, target.port): target.portal for target in self._up}
        try:
            for server in tcpsockets.end_silent(portals, _SILENCE):
                log.warning("image %s: %s is silent", self._image.name, portals[server])
        except OSError as error:
            log.debug("asking for the connections to %s: %s", ", ".join(portals.values()), error)

    def _look(self) -> None:
        """Make the map's paths the usable parents, have the others brought up, and note those just lost."""
        with self._lock:
            there, failed = sessions(), self._failed()
            numbers = []
            first = next(iter(self._targets.values()))
            first_only = self._has_head_start(first)
            for parent, target in self._targets.items():
                number = number_of(there.get(target), self._image)
                if target in self._up and number is not None and number not in failed:
                    numbers.append(number)
                    continue
                if target in self._up:
                    log.warning("image %s: parent %s lost", self._image.name, parent.host)
                    self._up.discard(target)
                    self._untold.append(parent)
                if not first_only or target is first:
                    self._work(target, self._bring_up)
            wanted = set(self._targets.values())
            self._up &= wanted
            self._show()
            self._load(numbers)
            for target in there.keys() - wanted:
                if image_of(target.name) == self._image.name:
                    self._work(target, self._let_go)

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

    def _failed(self) -> list[str]:
        """The paths that failed since the last look: each with an event, so that mostly no process is needed."""
        events, failed = devmapper.events(self._map), []
        if events != self._events:
            failed = devmapper.failed_paths(self._map)
            self._events = events
        return failed

    def _load(self, numbers: list[str]) -> None:
        if self._loaded == numbers:
            return
        log.info("image %s: paths are now %s", self._image.name, ", ".join(numbers) or "none; reads wait")
        self._loaded = None
        devmapper.reload(self._map, [self._table(self._image, numbers)], read_only=True)
        self._loaded = numbers

    def _tell(self) -> None:
        with self._lock:
            lost, self._untold = self._untold, []
        for parent in lost:
            try:
                self._lost(self._image, parent)
            except Exception:  # whatever the agent's side does, the paths have to be watched on
                log.exception("image %s: telling that parent %s is lost failed", self._image.name, parent.host)

    # The threads of single parents

    def _work(self, target: Target, act: Callable[[Target], None]) -> None:
        """Start a parent's thread, unless it has one. Called with the lock held."""
        worker = self._workers.get(target)
        if not self._stopped.is_set() and (worker is None or not worker.is_alive()):
            self._workers[target] = Watch(target.name, partial(act, target), self._stopped)
            self._workers[target].start()

    def _bring_up(self, target: Target) -> None:
        """Log in and wait for the disk, with a bounded back-off, while the parent is wanted."""
        pause, said = _FIRST_RETRY, ""
        while not self._stopped.is_set() and (wanted := self._wanted(target)) is not None:
            trouble = self._try(wanted)
            if not trouble:
                with self._lock:
                    self._up.add(target)
                    self._show()
                self._alarm.ring()
                return
            if trouble != said:
                log.info("image %s: waiting for %s: %s", self._image.name, target.name, trouble)
            said = trouble
            self._stopped.wait(pause)
            pause = min(2 * pause, _LAST_RETRY)

    def _wanted(self, target: Target) -> Target | None:
        """The target as the list of parents has it now: its secret may be another one. None: it is not in the list."""
        with self._lock:
            return next((wanted for wanted in self._targets.values() if wanted == target), None)

    def _try(self, target: Target) -> str:
        """What keeps the parent from being usable; nothing if it is."""
        try:
            session = sessions().get(target)
            if session is None:
                log_in(target, self._initiator)
                session = sessions().get(target)
            if session is None or not session.logged_in:
                return "not logged in"
            session.fail_fast()
            disk = session.disk()
            if disk is None:
                session.scan()
                disk = session.disk()
            if disk is None:
                return "no disk yet"
            if alien(disk, self._image):
                self._head_start = 0.0  # no waiting makes it a path
                self._asking.ask(target, disk)
            return flaw(disk, self._image)
        except CommandFailed as error:
            if error.code in REFUSALS:
                self._heard = time.monotonic()
            return REFUSALS.get(error.code, str(error))
        except (DriverError, OSError) as error:
            return str(error)

    def _let_go(self, target: Target) -> None:
        if self._wanted(target) is not None:
            return  # again
        try:
            log_out(target)
        except (DriverError, OSError) as error:  # the next look begins anew
            log.warning("image %s: leaving %s: %s", self._image.name, target.name, error)


def _targets(image: Image, parents: Sequence[Parent]) -> dict[Parent, Target]:
    """The parents in their order with where they serve the image. Raises NoParents, BadAddress, BadName."""
    if not parents:
        raise NoParents(image.name)
    return {
        parent: Target(target_name(parent.host, image.name), *portal_of(parent.address), parent.secret)
        for parent in parents
    }


def _connected(target: Target) -> bool:
    try:
        return tcpsockets.connected(target.ip, target.port)
    except OSError as error:
        log.debug("asking for the connections to %s: %s", target.portal, error)
        return False
