"""Serve an image by a qemu-storage-daemon on a unix socket: one daemon per image and host.

The socket is bound here, before there is anything to serve, and handed to the daemon. Children may connect at any time:
they wait in its backlog until the daemon greets them. The driver keeps the socket open, so that children of a daemon
that died wait for the next one in the same way.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drivers.base import Child, Device, Died, Image, Place
from drivers.door import door
from drivers.errors import BadDevice, DaemonFailed, NotServing, ProtocolViolated
from drivers.host.space import Room
from drivers.host.watch import Watch
from drivers.names import checked, fitting
from drivers.nbd import probe as nbdprobe
from drivers.nbd.endpoints import CACHE_NODE, address_of, cache_export, client_node, socket_of
from drivers.needs import QEMU_STORAGE_DAEMON, Needs
from drivers.qemu import daemon
from drivers.qemu.daemon import LISTEN_FD, Daemon
from drivers.qemu.growth import EVERY, Growth, find

log = logging.getLogger(__name__)

_BACKLOG = 4096
_SOCKET_MODE = 0o666  # the folder decides who gets here: QEMU may run as another user than the agent
_IO_URING = '"aio": "io_uring"'
_FIRST_RETRY = 0.005
_LAST_RETRY = 0.1


@dataclass
class _Unit:
    """What one image has here: the socket, while this driver object holds it, and the daemon.

    ``lock`` is held by every call that changes it.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    listener: socket.socket | None = None
    daemon: Daemon | None = None
    read_by_start: int = 0


@door
class NbdExport:
    """Exports on unix sockets in ``<run>/serve``."""

    needs = Needs(tools=(QEMU_STORAGE_DAEMON,))

    def __init__(self, place: Place, *, died: Died) -> None:
        self._folder = place.run / "serve"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._units = {image: _Unit(daemon=found) for image, found in daemon.running(self._folder).items()}
        self._growth = Growth(Room(place.state, place.reserve), CACHE_NODE)
        self._watcher = _Watcher(died, self._growth)
        self._closed = False
        for image, unit in self._units.items():
            if unit.daemon is not None:
                self._growth.add(unit.daemon)
                self._watcher.add(image, unit.daemon)

    @property
    def address(self) -> str:
        """``unix://`` and the folder of the sockets."""
        return address_of(self._folder)

    def reserve(self, image: str) -> None:
        """Bind the image's socket, unless it is bound here or served by a daemon. Raises BadName."""
        unit = self._unit(image)
        with unit.lock:
            if unit.daemon is None or unit.daemon.ended():
                self._listen(image, unit)

    def publish(self, image: Image, device: Device, *, replace: bool = False, timeout: float = 60) -> None:
        """Serve ``device.node`` and return when a client gets an answer.

        A running daemon is left alone if it serves exactly this node, unless ``replace``; else another takes its place
        and its clients wait meanwhile. With a parent that is not ready yet this waits, up to ``timeout`` seconds, for
        that parent. After a failure nothing serves and the endpoint stays reserved.

        Raises BadDevice, BadName, DaemonFailed, ToolMissing.
        """
        argv = self._argv(image, device)
        unit = self._unit(image.name)
        with unit.lock:
            if unit.daemon is not None and (replace or not self._fits(image.name, unit.daemon, argv)):
                self._listen(image.name, unit)  # first, so that no child finds nobody when the old daemon goes
                self._stop(image.name, unit)
            if unit.daemon is None:
                listener = self._listen(image.name, unit)
                opened = None if device.opened is None else device.opened.fd
                unit.daemon = daemon.spawn(argv, self._path(image.name, "log"), listener.fileno(), opened)
            try:
                self._growth.add(unit.daemon)
                self._wait_ready(image, unit.daemon, timeout)
            except BaseException:
                self._stop(image.name, unit)
                raise
            unit.read_by_start = unit.read_by_start or unit.daemon.bytes_read()
            self._watcher.add(image.name, unit.daemon)

    def local(self, image: Image) -> Device:
        """The image as this host serves it, for its own VMs."""
        return Device(size=image.size, node=client_node(socket_of(self.address, image.name), image.key))

    def hit_bytes(self, image: str) -> int | None:
        """Bytes that the image's daemon has read from files since it was published: what its parents were spared.

        None if it reads by io_uring: neither the kernel nor the daemon counts those.
        """
        unit = self._unit(image)
        served_by = unit.daemon  # a heartbeat asks while others publish and withdraw
        if served_by is None:
            return 0
        if any(_IO_URING in argument for argument in served_by.argv):
            return None
        return max(0, served_by.bytes_read() - unit.read_by_start)

    def serving(self, image: str) -> bool:
        """Whether a client gets an answer at this moment."""
        served_by = self._unit(image).daemon
        if served_by is None or served_by.ended():
            return False
        try:
            nbdprobe.Client(self._path(image, "sock"), image, timeout=1).close()
        except (NotServing, ProtocolViolated):
            return False
        return True

    def allow(self, image: str, children: Sequence[Child]) -> None:
        """Nothing to do: who may open the socket is decided by the permissions of its folder."""

    def withdraw(self, image: str) -> None:
        """Stop the image's daemon and remove its files. Children that wait at the socket are hung up on."""
        unit = self._unit(image)
        with unit.lock:
            self._path(image, "sock").unlink(missing_ok=True)
            self._stop(image, unit)
            if unit.listener is not None:
                unit.listener.close()
                unit.listener = None
            for kind in ("new", "pid", "log"):
                self._path(image, kind).unlink(missing_ok=True)

    def existing(self) -> frozenset[str]:
        """Images with a daemon or a file left on the host."""
        with self._lock:
            daemons = {image: unit.daemon for image, unit in self._units.items()}
        running = (image for image, daemon in daemons.items() if daemon is not None and not daemon.ended())
        return frozenset((*(path.stem for path in self._folder.iterdir()), *running))

    def close(self) -> None:
        """Let go of everything without stopping it: daemons go on serving, for the next driver object to find."""
        if self._closed:
            return
        self._closed = True
        self._watcher.close()
        with self._lock:
            for unit in self._units.values():
                if unit.listener is not None:
                    unit.listener.close()
            self._units.clear()

    def _unit(self, image: str) -> _Unit:
        with self._lock:
            return self._units.setdefault(checked(image), _Unit())

    def _fits(self, image: str, found: Daemon, argv: Sequence[str]) -> bool:
        """Whether a daemon runs, serves what is wanted, and is the one that the socket's path leads to."""
        return not found.ended() and found.argv == argv and nbdprobe.listens(self._path(image, "sock"))

    def _path(self, image: str, kind: str) -> Path:
        return self._folder / f"{checked(image)}.{kind}"

    def _listen(self, image: str, unit: _Unit) -> socket.socket:
        """The image's socket, bound in one step if it is not yet: a child finds the old one or the new one."""
        path, fresh = fitting(self._path(image, "sock")), self._path(image, "new")
        if unit.listener is not None:
            if nbdprobe.listens(path):
                return unit.listener
            unit.listener.close()  # somebody has removed the file
        fresh.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(fresh))
            listener.listen(_BACKLOG)
            fresh.chmod(_SOCKET_MODE)
            fresh.rename(path)
        except BaseException:
            listener.close()
            raise
        log.debug("image %s: bound %s", image, path)
        unit.listener = listener
        return listener

    def _stop(self, image: str, unit: _Unit) -> None:
        if unit.daemon is not None:
            self._watcher.remove(image)
            unit.daemon.stop()
            unit.daemon, unit.read_by_start = None, 0

    def _argv(self, image: Image, device: Device) -> tuple[str, ...]:
        """The daemon's command line. It serves the image by its key, for hosts, and by its name, for people."""
        if device.node is None:
            raise BadDevice(f"the device of image {image.name} has no QEMU block node to serve")
        exports = [_export("by-key", image.key, "top"), _export("by-name", image.name, "top")]
        if find(device.node, CACHE_NODE):
            exports.append(_export("cache", cache_export(image.name), CACHE_NODE) + ",allocation-depth=on")
        return (
            daemon.PROGRAM,
            "--pidfile",
            str(self._path(image.name, "pid")),
            "--blockdev",
            json.dumps({**device.node, "node-name": "top"}),
            "--nbd-server",
            f"addr.type=fd,addr.str={LISTEN_FD},max-connections=0",
            *(argument for export in exports for argument in ("--export", export)),
        )

    def _wait_ready(self, image: Image, started: Daemon, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for pause in _pauses():
            try:
                size = self._greeted(image.name, started, deadline)
            except (NotServing, ProtocolViolated) as error:
                # The daemon's socket has a greeter but the export is not there yet, or it ended just now.
                if started.ended(min(pause, max(0, deadline - time.monotonic()))) or time.monotonic() >= deadline:
                    raise self._failure(image.name, started, f"is not ready after {timeout:g} s") from error
                log.debug("waiting for the daemon of image %s: %s", image.name, error)
                continue
            if size != image.size:
                raise self._failure(image.name, started, f"serves {size} bytes, not the image's {image.size}")
            return

    def _greeted(self, image: str, started: Daemon, deadline: float) -> int:
        """The size of the export. Raises NotServing when the daemon ends, or does not greet before the deadline."""
        path = self._path(image, "sock")
        sock = nbdprobe.knock(path)
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        poller.register(started, select.POLLIN)
        ready = [fd for fd, _ in poller.poll(max(0, deadline - time.monotonic()) * 1000)]
        if sock.fileno() not in ready:
            sock.close()
            raise NotServing(f"no greeting at {path}")
        with nbdprobe.Client(path, image, timeout=max(0.1, deadline - time.monotonic()), sock=sock) as client:
            return client.size

    def _failure(self, image: str, failed: Daemon, what: str) -> DaemonFailed:
        said = daemon.last_lines(self._path(image, "log"))
        return DaemonFailed(image, failed.ending() if failed.ended() else what, said)


class _Watcher:
    """Waits for the end of all daemons and tells about those that nobody asked to end. Limits their growth, too."""

    def __init__(self, died: Died, growth: Growth) -> None:
        self._died, self._growth = died, growth
        self._lock = threading.Lock()
        self._daemons: dict[str, Daemon] = {}
        self._stopped = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = Watch("export-watch", self._watch, self._stopped)
        self._thread.start()

    def add(self, image: str, watched: Daemon) -> None:
        with self._lock:
            self._daemons[image] = watched
        os.eventfd_write(self._wake, 1)

    def remove(self, image: str) -> None:
        with self._lock:
            self._daemons.pop(image, None)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._stopped.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _watch(self) -> None:
        while not self._stopped.is_set():
            poller = select.poll()
            poller.register(self._wake, select.POLLIN)
            with self._lock:
                watched = dict(self._daemons)
            for each in watched.values():
                poller.register(each, select.POLLIN)
            poller.poll(EVERY * 1000 if self._limited() else None)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            for image, each in watched.items():
                # One that was asked to stop is not watched any more.
                if each.ended() and self._is_watched(image, each):
                    log.warning("the storage daemon of image %s %s", image, each.ending())
                    self._died(image)
                    self._forget(image, each)  # now that it was heard; else it is told again

    def _limited(self) -> bool:
        """Whether there is a daemon whose limit is to be set again soon."""
        try:
            return self._growth.share_out()
        except OSError as error:
            log.warning("caches grow no further than they may now: %s", error)
            return True

    def _is_watched(self, image: str, each: Daemon) -> bool:
        with self._lock:
            return self._daemons.get(image) is each

    def _forget(self, image: str, ended: Daemon) -> None:
        with self._lock:
            if self._daemons.get(image) is ended:
                del self._daemons[image]


def _export(export_id: str, name: str, node: str) -> str:
    return f"nbd,id={export_id},node-name={node},name={name},writable=off"


def _pauses() -> Iterator[float]:
    """Seconds between tries: short at first, bounded."""
    pause = _FIRST_RETRY
    while True:
        yield pause
        pause = min(pause * 2, _LAST_RETRY)
