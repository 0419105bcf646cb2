"""Reach parents over NBD on unix sockets.

The storage daemon opens its parent by a symlink, which this driver points at one parent after another. QEMU's NBD
client holds its requests when the connection breaks, and connects again by the same path: at once, then after 1, 2, 4,
8, 16 s.

One thread per image holds a connection of its own to the parent in use. It ends when the parent's daemon ends, and then
the symlink is moved before the daemon's retry after one second.

Each second the thread reads a sector. If that takes longer than a second, it reads from the other parents as well, and
leaves a parent that is silent while another one answers, for a minute (quarantine.py). A parent that does not even
greet has 5 s, as it may be starting. Only the beginning of the image is read so: a parent that hangs at other ranges
is not noticed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from drivers.attach.quarantine import Quarantine
from drivers.attach.routes import Routes, origin_file
from drivers.base import Device, Image, LostParent, Opened, Parent, PathState, PathStatus, Place
from drivers.door import door
from drivers.errors import NoParents, NotServing, ProtocolViolated
from drivers.host.watch import Watch
from drivers.names import fitting
from drivers.nbd import probe as nbdprobe
from drivers.nbd.endpoints import RECONNECT_DELAY, client_node, socket_of
from drivers.nbd.hold import HoldingServer
from drivers.needs import Needs
from drivers.qemu.daemon import FILE_FD, STOP_GRACE

log = logging.getLogger(__name__)

GREETING_WAIT = STOP_GRACE + 0.5
"""Seconds that a parent gets to greet again before another one takes over: its agent may be restarting its daemon, and
has to kill one that waits for a parent which hangs."""

GREETING_LIMIT = 5.0
"""Seconds after which a parent that does not greet is left if another one serves: it may be starting."""

_PING_INTERVAL = _PING_LIMIT = 1.0
"""Seconds between two reads that ask a parent whether it lives, and until it is doubted because it did not answer."""

ASK_INTERVAL = 10.0
"""Seconds after which parents that come before the one in use are asked again, if none of them answered."""

_PING_LENGTH = 512
_ANSWER_TIMEOUT = 2.0
_FIRST_RETRY = 0.05
_LAST_RETRY = 1.0


@door
class NbdAttach:
    """Routes to parents as symlinks in ``<run>/parent``."""

    needs = Needs()

    def __init__(
        self,
        place: Place,
        *,
        lost: LostParent,
        greeting_wait: float = GREETING_WAIT,
        greeting_limit: float = GREETING_LIMIT,
        return_limit: float = _PING_LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock``: seconds, by which parents that hung rest, and are asked again."""
        self._folder = place.run / "parent"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lost, self._clock = lost, clock
        self._patience = _Patience(greeting_wait, greeting_limit, return_limit)
        self._routes: Routes[_Route] = Routes()

    def origin(self, image: Image, file: Path | Opened) -> Device:
        """The device of a host that has the whole image in ``file``. Raises BadDisk.

        What is open already the storage daemon opens by its own descriptor of it: an agent that is started again then
        finds the same command line, and with it the daemon that fits.
        """
        path = origin_file(image, file)
        whole = {"driver": "host_device" if path.is_block_device() else "file", "filename": str(path)}
        opened = file if isinstance(file, Opened) else None
        if opened is not None:
            whole |= {"filename": f"/proc/self/fd/{FILE_FD}", "node-name": f"object-{opened.mark}"}
        return Device(size=image.size, node={"driver": "raw", "read-only": True, "file": whole}, opened=opened)

    def connect(self, image: Image, parents: Sequence[Parent]) -> Device:
        """Point the image's route at the first parent that listens and watch it; at the first of all if none does.

        A route that is there already is kept when its parent is one of ``parents`` and listens. The device names the
        route: it changes when the storage daemon may hold on to a parent that is not the one in use any more, so that
        publishing the device again drops that parent.

        Raises NoParents, BadAddress, BadName.
        """
        route = self._routes.find(image.name)
        if route is None:
            quarantine: Quarantine[Parent] = Quarantine(self._clock)
            route = _Route(self._folder, image, parents, self._lost, self._patience, quarantine, self._clock)
            self._routes.add(image.name, route)
        else:
            route.follow(parents)
        return Device(size=image.size, node=_node(route.path, image.key))

    def update(self, image: Image, parents: Sequence[Parent]) -> bool:
        """Move to the first of ``parents`` that listens. True if the old one has to be dropped by publishing again.

        ``connect`` gives the device of the new route then. The same list again changes nothing.

        Raises NotAttached, NoParents, BadAddress.
        """
        return self._routes.of(image.name).follow(parents)

    def unsettled(self, image: str) -> bool:
        """Whether a parent that comes before the one in use does not rest, and answers a read."""
        route = self._routes.find(image)
        return route is not None and route.may_return()

    def abandon(self, image: str) -> None:
        """Nothing: the storage daemon that waits is stopped as a whole."""

    def disconnect(self, image: str) -> None:
        """Stop watching and remove the route. Its daemon should be gone by now."""
        self._routes.drop(image)
        for path in [*self._folder.glob(f"{image}.*.sock"), self._folder / f"{image}.wait"]:
            path.unlink(missing_ok=True)

    def paths(self, image: str) -> list[PathStatus]:
        """The routes in the order of the parents. Raises NotAttached."""
        return self._routes.of(image).paths()

    def existing(self) -> frozenset[str]:
        """Images with a route on the host, whole or half removed."""
        return frozenset(path.name.split(".")[0] for path in self._folder.iterdir())

    def close(self) -> None:
        """Stop watching, but leave the routes: daemons go on reading, for the next driver object to find."""
        self._routes.close()


def _node(path: Path, key: str) -> dict[str, object]:
    """Reads the parent behind ``path`` and says that every range holds data, without asking the parent.

    QEMU's NBD server asks for the block status of what it is about to read, and sends ranges of zeros without reading
    them. Each read would so cost a question that travels up the whole tree, and zeros would never be kept: a host could
    not read them with its parents gone. The quorum of one child answers "data" when its child cannot tell, which
    blkdebug makes sure of. (QEMU: nbd_co_send_sparse_read in nbd/server.c, quorum_co_block_status in block/quorum.c)
    """
    # A daemon that starts before its parent waits for it; who starts the daemon limits that.
    parent = client_node(path, key, open_timeout=RECONNECT_DELAY)
    return {
        "driver": "quorum",
        "read-only": True,
        "read-pattern": "fifo",
        "vote-threshold": 1,
        "children": [
            {
                "driver": "blkdebug",
                "inject-error": [{"event": "none", "iotype": "block-status"}],
                "image": parent,
            }
        ],
    }


@dataclass(frozen=True)
class _Patience:
    """GREETING_WAIT, GREETING_LIMIT, and seconds within which one that is gone back to answers; or what a test has."""

    wait: float
    limit: float
    to_return: float


class _Route:
    """One image's way to its parents: the symlinks, and the thread that watches the parent in use.

    There is a symlink per generation, all pointing at the parent in use. A daemon knows its own one; a new generation
    begins when daemons of the earlier ones may hold on to another parent: connected to it, or waiting at its socket.
    """

    def __init__(
        self,
        folder: Path,
        image: Image,
        parents: Sequence[Parent],
        lost: LostParent,
        patience: _Patience,
        quarantine: Quarantine[Parent],
        clock: Callable[[], float],
    ) -> None:
        self._folder, self._image, self._lost, self._patience = folder, image, lost, patience
        self._sockets = _sockets(image, parents)
        self._lock = threading.Lock()
        self._revision = 0  # counts the lists of parents
        self._quarantine, self._clock = quarantine, clock
        self._returns: Parent | None = None
        """A parent that was left, answers, and is to be read from again."""
        self._ask_again = -math.inf
        """Before when none of them is asked."""
        self._alive = True
        self._generation = max(self._generations(), default=0)
        self._parent = self._resume() or _first_listening(self._sockets) or next(iter(self._sockets))
        self._held = {self._parent}
        """The parents that a daemon may hold on to: more than one after a move that failed."""
        self._point(self._sockets[self._parent], self._generation)
        self._stopped = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = Watch(f"parent-of-{image.name}", self._watch, self._stopped)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._wake)
            raise

    @property
    def path(self) -> Path:
        """The symlink of this generation."""
        return self._link(self._generation)

    def follow(self, parents: Sequence[Parent]) -> bool:
        """See NbdAttach.update."""
        sockets = _sockets(self._image, parents)
        with self._lock:
            same = list(sockets) == list(self._sockets)
            again = self._returns if same else None
            if same and len(self._held) < 2 and again is None:
                return False
            kept = self._parent if self._parent in sockets else next(iter(sockets))
            in_order = {each: sockets[each] for each in self._quarantine.in_order(sockets)}
            parent = again or _first_listening(in_order) or kept
            moved = self._move(parent, sockets[parent])
            self._sockets = sockets  # only now: a move that fails is tried again with the same list
            self._returns = None
            self._revision += 1
        os.eventfd_write(self._wake, 1)
        return moved

    def may_return(self) -> bool:
        """See NbdAttach.unsettled. Those that do not answer are asked again after ASK_INTERVAL."""
        with self._lock:
            self._returns, revision = None, self._revision
            before = itertools.takewhile(lambda each: each[0] != self._parent, self._sockets.items())
            better = {parent: path for parent, path in before if not self._quarantine.holds(parent)}
        if not better or self._clock() < self._ask_again:
            return False
        found = self._best_answering(better)
        if found is None:
            self._ask_again = self._clock() + ASK_INTERVAL
            return False
        with self._lock:
            if revision == self._revision:  # else there is another list by now
                self._returns = found
            return self._returns is not None

    def paths(self) -> list[PathStatus]:
        """See NbdAttach.paths."""
        with self._lock:
            sockets = self._sockets
            active = self._parent if self._alive else None
        return [PathStatus(parent, _state(path, active=parent == active)) for parent, path in sockets.items()]

    def close(self) -> None:
        """Stop watching; the symlinks stay. Not to be called from the LostParent callback."""
        self._stopped.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    # The symlinks. All of these but the first three are called with the lock held.

    def _link(self, generation: int) -> Path:
        return fitting(self._folder / f"{self._image.name}.{generation}.sock")

    def _generations(self) -> list[int]:
        found = [path.name.split(".")[1] for path in self._folder.glob(f"{self._image.name}.*.sock")]
        return [int(generation) for generation in found if generation.isdecimal()]

    def _resume(self) -> Parent | None:
        """The parent that an earlier driver object has chosen, if it is good enough to stay with."""
        link = self._link(self._generation)
        target = link.readlink() if link.is_symlink() else None
        if target is None or not nbdprobe.listens(target):
            return None
        for parent, path in self._sockets.items():
            if path == target:
                return parent
        self._generation += 1  # a running daemon holds on to a parent that is not wanted any more
        return None

    def _move(self, parent: Parent, path: Path) -> bool:
        """Read from ``parent`` from now on. True if a daemon may hold on to another one."""
        held_elsewhere = not self._held <= {parent}
        generation = self._generation + held_elsewhere
        self._held |= {parent}
        self._point(path, generation)
        if parent != self._parent:
            log.info("image %s: reads from parent %s now, not %s", self._image.name, parent.host, self._parent.host)
        self._generation, self._parent, self._held = generation, parent, {parent}
        return held_elsewhere

    def _point(self, target: Path, newest: int) -> None:
        """Point the symlinks of all generations at ``target``, each in one step.

        The newest first: if the next one fails, who starts anew still sees that a generation has begun.
        """
        fresh = self._folder / f"{self._image.name}.new.sock"
        for generation in sorted({*self._generations(), newest}, reverse=True):
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(target)
            fresh.rename(self._link(generation))

    # The thread

    def _watch(self) -> None:
        with self._lock:  # if this thread has died in the waiting room, the route still leads there
            self._point(self._sockets[self._parent], self._generation)
        while not self._stopped.is_set():
            with self._lock:
                parent, path = self._parent, self._sockets[self._parent]
            try:
                self._hold(parent, path)
            except (NotServing, ProtocolViolated) as error:
                log.warning("image %s: parent %s lost: %s", self._image.name, parent.host, error)
                self._fail_over(parent, path, self._better(parent, error))

    def _better(self, parent: Parent, error: Exception) -> Parent | None:
        """Another one that answers reads, where this one was lost although it is there: then it rests."""
        if isinstance(error, _Hangs | ProtocolViolated):
            self._quarantine.add(parent)
        if isinstance(error, ProtocolViolated):  # it fails a read, say
            return self._first_answering(self._others(parent))
        return error.better if isinstance(error, _Hangs) else None

    def _hold(self, parent: Parent, path: Path) -> None:
        """Hold a connection to a parent while it is the one in use and answers. Raises NotServing, ProtocolViolated."""
        with nbdprobe.knock(path) as sock:
            # A parent that listens but does not greet is not ready yet: wait for it, as the storage daemon does.
            if self._await_answer(sock, parent, self._patience.limit, _Starts) is _News.RELEASED:
                return
            with self._client(path, sock, self._patience.limit) as client:
                self._alive = True
                while (news := self._await(client, parent, _PING_INTERVAL)) is _News.NONE:
                    client.ask(0, _PING_LENGTH)
                    if self._await_answer(client, parent, _PING_LIMIT, _Hangs) is _News.RELEASED:
                        return
                    client.answer(_PING_LENGTH)
            if news is _News.READABLE:
                raise NotServing(f"the server at {path} hung up")

    def _await_answer(self, connection: _Pollable, parent: Parent, limit: float, trouble: type[_Hangs]) -> _News:
        """Wait for something to read, or for the parent not to be the one in use.

        A parent that takes longer than ``limit`` seconds is lost as soon as another one answers a read and it has not
        answered in the meantime: on a machine where all are slow none is better. Raises ``trouble``.
        """
        said = False
        while (news := self._await(connection, parent, limit)) is _News.NONE:
            better = self._first_answering(self._others(parent))
            if better is not None and self._await(connection, parent, 0) is _News.NONE:
                raise trouble(better)
            if better is None and not said:
                log.warning("image %s: parent %s %s, nor does another", self._image.name, parent.host, trouble.what)
                said = True
        return news

    def _others(self, parent: Parent) -> dict[Parent, Path]:
        with self._lock:
            return {other: path for other, path in self._sockets.items() if other != parent}

    def _await(self, connection: _Pollable, parent: Parent, timeout: float) -> _News:
        """Wait, ``timeout`` seconds at most, for something to read, or for the parent not to be the one in use."""
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        deadline = time.monotonic() + timeout
        while True:
            ready = [fd for fd, _ in poller.poll(max(0, deadline - time.monotonic()) * 1000)]
            self._drain_wake()
            if self._stopped.is_set() or self._parent != parent:
                return _News.RELEASED
            if connection.fileno() in ready:
                return _News.READABLE
            if time.monotonic() >= deadline:
                return _News.NONE

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _client(self, path: Path, sock: socket.socket, timeout: float = _ANSWER_TIMEOUT) -> nbdprobe.Client:
        client = nbdprobe.Client(path, self._image.key, timeout=timeout, sock=sock)
        if client.size != self._image.size:
            client.close()
            raise ProtocolViolated(f"the server at {path} has {client.size} bytes, not {self._image.size}")
        return client

    def _fail_over(self, lost: Parent, path: Path, better: Parent | None) -> None:
        """Stay with a parent that serves again soon, else go to the first other one that serves, or to the better."""
        with self._lock:
            if self._parent != lost:
                return  # a new list has led elsewhere meanwhile
            revision, sockets = self._revision, self._sockets
            self._alive = False
            # A socket that its agent holds open without a daemon behind it takes our daemon's next connection, too.
            held = nbdprobe.listens(path)
            self._held = self._held | {lost} if held else self._held - {lost}
        others = {parent: other for parent, other in sockets.items() if parent != lost}
        awake = {parent: other for parent, other in others.items() if not self._quarantine.holds(parent)}
        again = {lost: path} if held else {}
        better = better if better in others else None  # a new list may be without it
        found = better or self._first_serving(again) or self._first_serving(awake) or self._first_serving(others)
        if found is not None:
            self._settle(found, revision)
        if found != lost:
            self._tell(lost)
        if found is None:
            self._wait_for_parents(lost)

    def _wait_for_parents(self, lost: Parent) -> None:
        """All parents are gone: look for any of them to come back, with a bounded back-off.

        Meanwhile the route leads to a server that answers no read. A daemon that starts can open it and serve what its
        cache holds, and one that waits there comes back at once when it is hung up on: its own back-off would have
        grown to 16 seconds.
        """
        log.warning("image %s: no parent serves; reads wait", self._image.name)
        pause = _FIRST_RETRY
        with self._waiting_room() as room:
            led = self._lead(room)
            while not self._stopped.is_set():
                with self._lock:
                    revision, sockets = self._revision, self._sockets
                found = self._first_serving(sockets)
                if found is None:
                    if revision != led:  # a new list has led the route to a parent that does not live either
                        led = self._lead(room)
                    self._pause(pause)
                    pause = min(pause * 2, _LAST_RETRY)
                elif self._settle(found, revision):
                    if found != lost:
                        self._tell(lost)
                    return

    def _lead(self, room: Path) -> int:
        """Lead the route to the waiting room. Returns which list of parents it leads away from."""
        with self._lock:
            self._point(room, self._generation)
            return self._revision

    @contextlib.contextmanager
    def _waiting_room(self) -> Iterator[Path]:
        path = fitting(self._folder / f"{self._image.name}.wait")
        with HoldingServer(path, self._image.size):
            yield path

    def _pause(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.poll(seconds * 1000)
        self._drain_wake()

    def _first_answering(self, sockets: Mapping[Parent, Path]) -> Parent | None:
        """The first parent that answers a read now, which one that waits for its own parents may not."""
        with self._asked(sockets) as asked:
            return next((asked[answer] for answer in as_completed(asked) if answer.result()), None)

    def _best_answering(self, sockets: Mapping[Parent, Path]) -> Parent | None:
        """The first one in this order that answers as soon as one has to that is in use, so as not to be left again."""
        deadline = time.monotonic() + self._patience.to_return
        with self._asked(sockets, self._patience.to_return) as asked:
            for answer, parent in asked.items():
                with contextlib.suppress(TimeoutError):
                    if answer.result(max(0, deadline - time.monotonic())):
                        return parent
        return None

    @contextlib.contextmanager
    def _asked(self, sockets: Mapping[Parent, Path], within: float = math.inf) -> Iterator[dict[Future[bool], Parent]]:
        """Whether these parents answer a read now, within so many seconds.

        All are asked side by side, so that none hides another; those whose answer is not awaited any more are left to
        their threads, which end with the sockets' time-outs.
        """
        pool = ThreadPoolExecutor(max(1, len(sockets)), thread_name_prefix=f"asking-for-{self._image.name}")
        try:
            yield {pool.submit(self._answers, parent, path, within): parent for parent, path in sockets.items()}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _answers(self, parent: Parent, path: Path, within: float) -> bool:
        began = time.monotonic()
        try:
            with nbdprobe.knock(path) as sock, self._client(path, sock) as client:
                client.read(0, _PING_LENGTH)
        except (NotServing, ProtocolViolated) as error:
            log.info("image %s: parent %s does not serve it: %s", self._image.name, parent.host, error)
            return False
        return time.monotonic() - began <= within

    def _first_serving(self, sockets: Mapping[Parent, Path]) -> Parent | None:
        """The first parent that serves the image; waits up to ``greeting_wait`` seconds for any of them to greet."""
        with contextlib.ExitStack() as stack:
            waiting: dict[Parent, socket.socket] = {}
            for parent, path in sockets.items():
                with contextlib.suppress(NotServing):
                    waiting[parent] = stack.enter_context(nbdprobe.knock(path))
            deadline = time.monotonic() + self._patience.wait
            while waiting and not self._stopped.is_set() and (left := deadline - time.monotonic()) > 0:
                poller = select.poll()
                for sock in waiting.values():
                    poller.register(sock, select.POLLIN)
                ready = [fd for fd, _ in poller.poll(left * 1000)]
                for parent in [parent for parent, sock in waiting.items() if sock.fileno() in ready]:
                    try:
                        self._client(sockets[parent], waiting.pop(parent)).close()
                    except (NotServing, ProtocolViolated) as error:
                        log.info("image %s: parent %s does not serve it: %s", self._image.name, parent.host, error)
                    else:
                        return parent
        return None

    def _settle(self, found: Parent, revision: int) -> bool:
        """Read from ``found``, unless a new list of parents has come meanwhile."""
        with self._lock:
            if revision == self._revision and not self._stopped.is_set():
                self._alive = True
                self._move(found, self._sockets[found])
                return True
        return False

    def _tell(self, lost: Parent) -> None:
        try:
            self._lost(self._image.name, lost.host)
        except Exception:  # whatever the agent's side does, the route has to be watched on
            log.exception("image %s: telling that parent %s is lost failed", self._image.name, lost.host)


class _Hangs(NotServing):
    """A parent does not answer, and a ``better`` one does."""

    what = "does not answer"

    def __init__(self, better: Parent) -> None:
        super().__init__(f"it {self.what}, and {better.host} does")
        self.better = better


class _Starts(_Hangs):
    """It has not even begun to."""

    what = "does not greet"


class _News(Enum):
    """What came of waiting."""

    READABLE = auto()
    RELEASED = auto()
    NONE = auto()


class _Pollable(Protocol):
    def fileno(self) -> int: ...


def _sockets(image: Image, parents: Sequence[Parent]) -> dict[Parent, Path]:
    """The parents in their order with the sockets where they serve the image. Raises NoParents, BadAddress, BadName.

    A parent that this user may not connect to is left out: a read would wait for that parent for ever.
    """
    sockets = {parent: fitting(socket_of(parent.address, image.name)) for parent in parents}
    usable = {parent: path for parent, path in sockets.items() if not _is_denied(path)}
    if sockets and not usable:
        raise NoParents(
            image.name,
            f"this agent's user may not connect to {', '.join(map(str, sockets.values()))}: run this agent as the user"
            " of its parents' agents, or as a member of the group that those were given by --group",
        )
    if not usable:
        raise NoParents(image.name)
    return usable


def _is_denied(path: Path) -> bool:
    """Whether this user may not connect to a socket. A socket that is not there may come: it denies nobody."""
    try:
        path.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return not os.access(path, os.W_OK, effective_ids=True)


def _first_listening(sockets: Mapping[Parent, Path]) -> Parent | None:
    return next((parent for parent, path in sockets.items() if nbdprobe.listens(path)), None)


def _state(path: Path, *, active: bool) -> PathState:
    if active:
        return PathState.ACTIVE
    return PathState.STANDBY if nbdprobe.listens(path) else PathState.LOST
