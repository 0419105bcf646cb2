"""Reach parents over iSCSI: one session per parent (open-iscsi), and one multipath map per image.

The map exists before any parent is reached. It holds requests while it has no path, and sends them by another path when
one fails. A thread per image keeps the paths in the map equal to the parents that are usable: it wakes at every
device-mapper event, and once a second looks for sessions that broke while nobody read. Several times a second it asks
the kernel for parents that do not even acknowledge what TCP sends them, and ends their connections: iSCSI's own watch
counts whole seconds.

While all reads go to the first usable parent, the first one is logged in to before the others: hosts that start
together need one path each, soon, and a login costs both of its ends. The others follow, side by side, once the first
is in the map, or gives no sign of life.

Host and parent prove themselves to each other by CHAP. The record of a parent, which open-iscsi logs in by, is written
here and not by iscsiadm, which takes secrets only where every user of the host can read them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from drivers import devmapper, scsi, tcpsockets
from drivers.base import FAILOVER, Device, Existing, Image, LostParent, Parent, PathState, PathStatus, Place
from drivers.command import run
from drivers.devmapper import SECTOR
from drivers.errors import BadDisk, CommandFailed, DriverError, NoParents
from drivers.iscsinames import (
    CHAP_USER,
    DISK,
    PORTAL_GROUP,
    Side,
    image_of,
    initiator_name,
    password,
    portal_of,
    serial_of,
    target_name,
)
from drivers.needs import DEVICE_MAPPER, DMSETUP, UDEVADM, Needs, Tool
from drivers.routes import Routes, origin_file

log = logging.getLogger(__name__)

TIMES = {
    # For a parent that is alone: it is left noop_out_interval + noop_out_timeout after its last sign. A shorter
    # noop_out_timeout gave false alarms on a loaded machine. From a login on replacement_timeout is 0, see fail_fast.
    "node.session.timeo.replacement_timeout": 1,
    "node.conn[0].timeo.noop_out_interval": 1,
    "node.conn[0].timeo.noop_out_timeout": 2,
    "node.conn[0].timeo.login_timeout": 5,
    "node.conn[0].timeo.logout_timeout": 2,
}
"""Seconds, as a parent's record has them (iscsid.conf)."""

_MAP = "virtman-attach-"
_SESSIONS = Path("/sys/class/iscsi_session")
_LOCKS = Path("/run/lock/iscsi")  # iscsiadm does not make it
_RECORDS = Path("/etc/iscsi/nodes")
# iscsiadm(8), exit status
_NO_SESSION, _SESSION_EXISTS, _NO_RECORDS = 2, 15, 21
_REFUSALS = {
    19: "it does not prove itself by the secret that Volt gave",
    24: "it refuses this host: Volt has not named it yet, or with another secret",
}
_LOGIN_LIMIT = 30.0
_FIRST_RETRY, _LAST_RETRY = 0.2, 1.0
_WATCH_INTERVAL, _SILENCE_INTERVAL = 1.0, 0.25
_SILENCE = 1.0
"""Seconds without a sign from a parent until it is left, if there is another one."""

HEAD_START = 30.0
"""Seconds that a host gives its first parent, which may still be making its own stack, while that one is connected."""
SIGN_OF_LIFE = 5.0
"""Seconds without a connection to the first parent, and without a refusal by it, after which it is not waited for: more
than iscsiadm needs to start on a host that makes a stack on a slow processor."""


class IscsiAttach:
    """Maps ``virtman-attach-<image>``, read by the first usable parent or by all, as the path policy says."""

    needs = Needs(
        tools=(Tool("iscsiadm", "open-iscsi"), Tool("iscsid", "open-iscsi"), DMSETUP, UDEVADM),
        modules=("iscsi_tcp", "dm_multipath", "dm_service_time", "dm_round_robin", "dm_queue_length"),
        nodes=(DEVICE_MAPPER,),
        root=True,
    )

    def __init__(self, place: Place, *, lost: LostParent) -> None:
        _LOCKS.mkdir(parents=True, exist_ok=True)
        self._name, self._policy, self._lost = initiator_name(place.host), place.path_policy, lost
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
            head_start = HEAD_START if self._policy == FAILOVER else 0.0
            self._routes.add(image.name, _Route(image, parents, self._table, self._lost, self._name, head_start))
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
        """Stop watching. Reads fail that wait in the map for a parent. Raises BadName, CommandFailed."""
        self._routes.drop(image)
        if devmapper.exists(_MAP + image):
            devmapper.message(_MAP + image, "fail_if_no_path")

    def disconnect(self, image: str) -> None:
        """Remove the map and all sessions and records of the image's parents. What reads from it is gone by now.

        Raises BadName, CommandFailed.
        """
        self.abandon(image)
        devmapper.remove(_MAP + image)
        targets = {target for target in _known_targets() if image_of(target.name) == image}
        if targets:
            with ThreadPoolExecutor(len(targets)) as pool:
                list(pool.map(_log_out, targets))

    def paths(self, image: str) -> list[PathStatus]:
        """The routes in the order of the parents. Raises NotAttached."""
        route = self._routes.of(image)
        usable = route.usable()
        return [PathStatus(parent, self._state(parent, usable)) for parent in route.parents()]

    def existing(self) -> Existing:
        """Images with a map, a session or a record. Raises CommandFailed, ToolMissing."""
        details = {name.removeprefix(_MAP): f"map {name}" for name in devmapper.names(_MAP)}
        for target in _known_targets():
            image = image_of(target.name)
            if image is not None:
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


@dataclass(frozen=True)
class _Target:
    """Where a parent serves an image. ``secret`` is the edge's, where it is known."""

    name: str
    ip: str
    port: int
    secret: str = field(default="", compare=False, repr=False)

    @property
    def portal(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"

    @property
    def record(self) -> Path:
        """Where open-iscsi has what it knows of the target."""
        return _RECORDS / self.name / f"{self.ip},{self.port},{PORTAL_GROUP}" / "default"


@dataclass(frozen=True)
class _Session:
    """A session as sysfs shows it (Linux: drivers/scsi/scsi_transport_iscsi.c)."""

    number: int
    target: _Target
    logged_in: bool
    device: Path

    def disk(self) -> Path | None:
        """The folder of the image's disk."""
        return next(self.device.glob(f"target*/*:{DISK}/block/*"), None)

    def fail_fast(self) -> None:
        """Have requests come back once the connection is gone, for the map to send them elsewhere. Raises OSError.

        The record cannot say it: open-iscsi makes 120 s of 0.
        """
        (_SESSIONS / f"session{self.number}" / "recovery_tmo").write_text("0")

    def scan(self) -> None:
        """Look for the image's disk. Raises OSError."""
        host = self.device.resolve().parent.name
        Path(f"/sys/class/scsi_host/{host}/scan").write_text(f"0 0 {DISK}")


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
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._workers: dict[_Target, threading.Thread] = {}
        found = devmapper.exists(self._map)
        self._began = self._heard = time.monotonic()
        """When the map was made, and when a parent last refused this host."""
        self._head_start = 0.0 if found else head_start
        """Seconds from the beginning, at most, in which only the first parent is logged in to; 0 once that is over."""
        self._events = -1 if found else 0
        """How many the map had had when its paths were asked for last."""
        self._loaded: list[str] | None = []
        """The numbers in the map, if known."""
        self._up: set[_Target] = set()
        devmapper.create(self._map, [table(image, [])], read_only=True)
        if found:
            self._find_paths()
        self._look()
        self._thread = threading.Thread(target=self._watch, name=f"parents-of-{image.name}", daemon=True)
        self._thread.start()

    def _find_paths(self) -> None:
        """An earlier driver object's paths are good until they fail."""
        devmapper.message(self._map, "queue_if_no_path")  # it may have been abandoned
        self._loaded = devmapper.numbers_in(devmapper.table(self._map))
        sessions = _sessions()
        numbers = {target: _number(sessions.get(target), self._image) for target in self._targets.values()}
        self._up = {target for target, number in numbers.items() if number in self._loaded}

    def follow(self, parents: Sequence[Parent]) -> None:
        """See IscsiAttach.update."""
        targets = _targets(self._image, parents)
        with self._lock:
            if list(targets.items()) == list(self._targets.items()):
                return
            self._targets = targets
            lost = self._look()
        self._tell(lost)

    def parents(self) -> list[Parent]:
        """In the order of the list."""
        with self._lock:
            return list(self._targets)

    def usable(self) -> list[Parent]:
        """Those with a path in the map, in order."""
        with self._lock:
            return [parent for parent, target in self._targets.items() if target in self._up]

    def close(self) -> None:
        """Stop watching; map and sessions stay. Not to be called from the LostParent callback."""
        self._stopped.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            worker.join()
        os.close(self._wake)

    # The watching thread

    def _watch(self) -> None:
        with contextlib.closing(devmapper.Events()) as events:
            poller = select.poll()
            poller.register(events, select.POLLIN)
            poller.register(self._wake, select.POLLIN)
            while not self._stopped.is_set():
                events.arm()
                try:
                    self._tell(self._look())
                except (DriverError, OSError) as error:
                    log.warning("image %s: looking after its paths: %s", self._image.name, error)
                for _ in range(int(_WATCH_INTERVAL / _SILENCE_INTERVAL)):
                    if poller.poll(_SILENCE_INTERVAL * 1000):
                        break
                    self._leave_silent()
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)

    def _leave_silent(self) -> None:
        """End the connections of silent parents, so that the map sends their requests by another path at once."""
        with self._lock:
            targets = set(self._up)
        if len(targets) < 2:
            return
        for target in targets:
            try:
                if tcpsockets.end_silent(target.ip, target.port, _SILENCE):
                    log.warning("image %s: %s is silent", self._image.name, target.portal)
            except OSError as error:
                log.debug("asking for the connections to %s: %s", target.portal, error)

    def _look(self) -> list[Parent]:
        """Make the map's paths the usable parents, and have the others brought up. Returns those just lost."""
        with self._lock:
            sessions, failed = _sessions(), self._failed()
            numbers, lost = [], []
            first = next(iter(self._targets.values()))
            first_only = self._has_head_start(first)
            for parent, target in self._targets.items():
                number = _number(sessions.get(target), self._image)
                if target in self._up and number is not None and number not in failed:
                    numbers.append(number)
                    continue
                if target in self._up:
                    log.warning("image %s: parent %s lost", self._image.name, parent.host)
                    self._up.discard(target)
                    lost.append(parent)
                if not first_only or target is first:
                    self._work(target, self._bring_up)
            self._load(numbers)
            wanted = set(self._targets.values())
            self._up &= wanted
            for target in sessions.keys() - wanted:
                if image_of(target.name) == self._image.name:
                    self._work(target, self._let_go)
            return lost

    def _has_head_start(self, first: _Target) -> bool:
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

    def _tell(self, lost: Iterable[Parent]) -> None:
        for parent in lost:
            try:
                self._lost(self._image, parent)
            except Exception:  # whatever the agent's side does, the paths have to be watched on
                log.exception("image %s: telling that parent %s is lost failed", self._image.name, parent.host)

    # The threads of single parents

    def _work(self, target: _Target, act: Callable[[_Target], None]) -> None:
        """Start a parent's thread, unless it has one. Called with the lock held."""
        worker = self._workers.get(target)
        if not self._stopped.is_set() and (worker is None or not worker.is_alive()):
            self._workers[target] = threading.Thread(target=act, args=(target,), name=target.name, daemon=True)
            self._workers[target].start()

    def _bring_up(self, target: _Target) -> None:
        """Log in and wait for the disk, with a bounded back-off, while the parent is wanted."""
        pause, said = _FIRST_RETRY, ""
        while not self._stopped.is_set() and self._wants(target):
            trouble = self._try(target)
            if not trouble:
                with self._lock:
                    self._up.add(target)
                os.eventfd_write(self._wake, 1)
                return
            if trouble != said:
                log.info("image %s: waiting for %s: %s", self._image.name, target.name, trouble)
            said = trouble
            self._stopped.wait(pause)
            pause = min(2 * pause, _LAST_RETRY)

    def _wants(self, target: _Target) -> bool:
        with self._lock:
            return target in self._targets.values()

    def _try(self, target: _Target) -> str:
        """What keeps the parent from being usable; nothing if it is."""
        try:
            session = _sessions().get(target)
            if session is None:
                _log_in(target, self._initiator)
                session = _sessions().get(target)
            if session is None or not session.logged_in:
                return "not logged in"
            session.fail_fast()
            disk = session.disk()
            if disk is None:
                session.scan()
                disk = session.disk()
            if disk is None:
                return "no disk yet"
            if _alien(disk, self._image):
                self._head_start = 0.0  # no waiting makes it a path
            return _flaw(disk, self._image)
        except CommandFailed as error:
            if error.code in _REFUSALS:
                self._heard = time.monotonic()
            return _REFUSALS.get(error.code, str(error))
        except (DriverError, OSError) as error:
            return str(error)

    def _let_go(self, target: _Target) -> None:
        try:
            _log_out(target)
        except DriverError as error:
            log.warning("image %s: leaving %s: %s", self._image.name, target.name, error)


def _targets(image: Image, parents: Sequence[Parent]) -> dict[Parent, _Target]:
    """The parents in their order with where they serve the image. Raises NoParents, BadAddress, BadName."""
    if not parents:
        raise NoParents(image.name)
    return {
        parent: _Target(target_name(parent.host, image.name), *portal_of(parent.address), parent.secret)
        for parent in parents
    }


def _connected(target: _Target) -> bool:
    try:
        return tcpsockets.connected(target.ip, target.port)
    except OSError as error:
        log.debug("asking for the connections to %s: %s", target.portal, error)
        return False


def _number(session: _Session | None, image: Image) -> str | None:
    """The ``major:minor`` of a session's disk, if it can be read now."""
    if session is None or not session.logged_in:
        return None
    with contextlib.suppress(OSError):  # it may be going
        disk = session.disk()
        if disk is not None and not _misfit(disk, image):
            return _word(disk / "dev")
    return None


def _misfit(disk: Path, image: Image) -> str:
    """Why a disk is not the image, as far as sysfs knows. Raises OSError."""
    if _word(disk / "device/state") != "running":
        return "its disk does not run"
    return _alien(disk, image)


def _alien(disk: Path, image: Image) -> str:
    """Why a disk is not the image, whatever its state. Raises OSError."""
    if int(_word(disk / "size")) * SECTOR != image.size:
        return "its disk is of another size"
    if serial_of(image).encode() not in (disk / "device/vpd_pg80").read_bytes():
        return "its disk is of another image"
    return ""


def _flaw(disk: Path, image: Image) -> str:
    """Why a disk cannot be a path to the image. Raises OSError."""
    if _word(disk / "device/state") == "offline":
        (disk / "device/state").write_text("running")  # the kernel gave it up; it answers again, or not
    if trouble := _misfit(disk, image):
        return trouble
    return "" if scsi.ready(Path("/dev") / disk.name) else "its disk does not answer"


def _word(path: Path) -> str:
    return path.read_text().strip()


def _sessions() -> dict[_Target, _Session]:
    """All sessions of this host."""
    found = {}
    for folder in _SESSIONS.glob("*"):
        with contextlib.suppress(OSError, ValueError, StopIteration):  # it may be coming or going
            connection = next(folder.glob("device/connection*/iscsi_connection/*"))
            ip, port = _word(connection / "persistent_address"), int(_word(connection / "persistent_port"))
            target = _Target(_word(folder / "targetname"), ip, port)
            number = int(folder.name.removeprefix("session"))
            found[target] = _Session(number, target, _word(folder / "state") == "LOGGED_IN", folder / "device")
    return found


def _known_targets() -> set[_Target]:
    """What this host has a session with or a record of."""
    found = set(_sessions())
    for folder in _RECORDS.glob(f"*/*,*,{PORTAL_GROUP}"):
        ip, port, _group = folder.name.split(",")
        found.add(_Target(folder.parent.name, ip, int(port)))
    return found


def _log_in(target: _Target, initiator: str) -> None:
    """Write the parent's record and log in by it. Raises DriverError, OSError."""
    target.record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(target.record, "w", opener=_private) as file:
        file.writelines(f"{name} = {value}\n" for name, value in _record(target, initiator).items())
    _told(["iscsiadm", "--mode", "node", "--targetname", target.name, "--portal", target.portal, "--login"],
          _SESSION_EXISTS)  # fmt: skip


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _record(target: _Target, initiator: str) -> dict[str, object]:
    """What open-iscsi does not take from its defaults (open-iscsi: usr/idbm_fields.h)."""
    return {
        "node.name": target.name,
        "node.tpgt": PORTAL_GROUP,
        "node.startup": "manual",
        "iface.iscsi_ifacename": "default",
        "iface.transport_name": "tcp",
        "iface.initiatorname": initiator,
        "node.discovery_type": "static",
        "node.conn[0].address": target.ip,
        "node.conn[0].port": target.port,
        "node.session.scan": "manual",  # only the one disk is looked for
        "node.session.initial_login_retry_max": 1,  # the retries are here
        **TIMES,
        "node.session.auth.authmethod": "CHAP",
        "node.session.auth.username": CHAP_USER,
        "node.session.auth.password": password(target.secret, Side.CHILD),
        "node.session.auth.username_in": CHAP_USER,
        "node.session.auth.password_in": password(target.secret, Side.PARENT),
    }


def _log_out(target: _Target) -> None:
    """End the session, if there is one, and remove the record. Raises DriverError."""
    session = _sessions().get(target)
    if session is not None:
        _told(["iscsiadm", "--mode", "session", "--sid", str(session.number), "--logout"], _NO_SESSION, _NO_RECORDS)
    target.record.unlink(missing_ok=True)
    for folder in (target.record.parent, target.record.parent.parent):
        with contextlib.suppress(OSError):  # there is none, or another parent's record is in it
            folder.rmdir()


def _told(argv: Sequence[str], *harmless: int) -> None:
    """Run an iscsiadm that may end with one of these codes as well. Raises DriverError."""
    try:
        run(argv, timeout=_LOGIN_LIMIT)
    except CommandFailed as error:
        if error.code not in harmless:
            raise
