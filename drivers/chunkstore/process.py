"""The process of the chunk store: started, found again, and watched.

The agent binds the sockets and hands them over (sd_listen_fds(3)). So clients that come while the process starts wait
in the kernel, and a process that dies is a reconnect for them, not a refusal.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from drivers.base import Place
from drivers.chunkstore.control import ANSWER, Control, StoreDown
from drivers.chunkstore.program import program
from drivers.errors import HostFailed
from drivers.host import daemon
from drivers.host.durable import write_atomically
from drivers.host.retry import until
from drivers.host.watch import Watch
from drivers.names import fitting

log = logging.getLogger(__name__)

STARTS_WITHIN = 60.0
"""Seconds: a large pool on a slow disk has to be read."""

VMS = ".vms.sock"
"""The socket of programs of this host. No image has a name with a dot."""

_BACKLOG = 4096
_SOCKET_MODE = 0o666  # the folder decides who gets here: QEMU may run as another user than the agent
_LOOPBACK = "127.0.0.1"
_IP_FREEBIND = 15
"""Linux: an address that this host gets only later can be bound already (ip(7))."""


class Process:
    """``began`` tells the process what it has to know, also if this agent has found it running.

    ``died`` is called when the process has died unasked, and has to return at once. The next ``ensure`` starts another.
    """

    def __init__(self, place: Place, began: Callable[[], None], died: Callable[[], None]) -> None:
        folder = place.run / "serve"
        folder.mkdir(parents=True, exist_ok=True)
        (place.state / "chunkstore").mkdir(parents=True, exist_ok=True)
        self._manifests = place.state / "manifests"
        self.vms = folder / VMS
        self.control = Control(place.run / "chunkd.sock")
        self._pid_file, self._log_file = place.run / "chunkd.pid", place.run / "chunkd.log"
        self._ip = place.address or _LOOPBACK
        self._port_file = place.state / "chunkstore/port"
        self._asked_port = place.port
        self._began, self._died = began, died
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._known = False
        """Whether this agent has told the process what it has to know."""
        self._daemon = daemon.adopt(self._pid_file)
        if self._daemon is None:
            self._bind()
        self._stopped = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watch = Watch("chunkstore-watch", self._watch_process, self._stopped)
        self._watch.start()

    @property
    def address(self) -> str:
        """Where other hosts connect: ``nbds://IP:PORT``."""
        host = f"[{self._ip}]" if ipaddress.ip_address(self._ip).version == 6 else self._ip
        return f"nbds://{host}:{self._port()}"

    def call(
        self, call: str, arguments: Mapping[str, object] | None = None, *, file: int | None = None,
        timeout: float = ANSWER,
    ) -> dict[str, Any]:  # fmt: skip
        """See ``Control.call``. Where no process runs nobody waits for one: the agent has bound the socket.

        Raises StoreDown, StoreRefused.
        """
        if not self.alive():
            raise StoreDown(self.control.path, "it does not run")
        return self.control.call(call, arguments, file=file, timeout=timeout)

    def alive(self) -> bool:
        """Whether the process runs."""
        running = self._daemon
        return running is not None and not running.ended()

    def ensure(self) -> None:
        """Have the process run, and know what it has to. Raises ToolMissing, StoreDown, StoreRefused, HostFailed."""
        with self._lock:
            if self._stopped.is_set():
                raise StoreDown(self.control.path, "it was stopped: start the agent again first")
            if self._known and self.alive():
                return
            if self.alive() and (why := self._outdated()):
                log.info("the chunk store is started again: %s", why)
                self._end()
            if not self.alive():
                self._end()
                self._bind()
                self._start()
            self._began()
            self._known = True

    def stop(self) -> None:
        """End the process, and all that it serves, for good. Nothing of it is left in the run folder."""
        self.close()
        with self._lock:
            self._end()
            for path in (self.control.path, self.vms, self._pid_file, self._log_file):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the process without stopping it, for the next agent to find."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        os.eventfd_write(self._wake, 1)
        self._watch.join()
        with self._lock:
            self._release()
            os.close(self._wake)

    # What follows wants the lock

    def _outdated(self) -> str:
        """Why a process that the agent before has started must not go on; empty if it may."""
        try:
            status = self.control.call("status")
        except StoreDown:
            return "it hangs"
        if status["version"] != version("virtman"):
            return "it is of another version"
        return "" if status["address"] == self.address.removeprefix("nbds://") else "this host has another address"

    def _end(self) -> None:
        ended, self._daemon, self._known = self._daemon, None, False
        if ended is not None:
            ended.stop()

    def _start(self) -> None:
        argv = [
            program(), "--manifests", str(self._manifests), "--control", str(self.control.path), "--vms", str(self.vms),
            "--listen", self.address.removeprefix("nbds://"), "--pid-file", str(self._pid_file),
        ]  # fmt: skip
        environment = {**os.environ, "LISTEN_FDS": str(len(self._sockets))}
        environment.pop("LISTEN_PID", None)  # of the agent, if systemd has handed sockets to it
        started = daemon.spawn(argv, environment, [sock.fileno() for sock in self._sockets], self._log_file)
        self._daemon = started
        if not until(lambda: started.ended() or self._answers(), limit=STARTS_WITHIN) or started.ended():
            self._end()
            said = daemon.last_lines(self._log_file) or "it said nothing"
            raise StoreDown(self.control.path, f"it {started.ending()}: {said}")
        os.eventfd_write(self._wake, 1)
        log.info("the chunk store runs, at %s", self.address)

    def _answers(self) -> bool:
        try:
            self.control.call("status", timeout=1)
        except StoreDown:
            return False
        return True

    def _bind(self) -> None:
        """Bind the sockets, unless they are bound here: of the agent, of programs of this host, of other hosts."""
        if self._sockets and all(path.is_socket() for path in (self.control.path, self.vms)):
            return
        self._release()
        with contextlib.ExitStack() as undo:
            bound = [
                undo.enter_context(_unix(path, mode))
                for path, mode in ((self.control.path, 0o600), (self.vms, _SOCKET_MODE))
            ]
            bound.append(undo.enter_context(self._tcp()))
            undo.pop_all()
        self._sockets = bound

    def _release(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._sockets = []

    def _tcp(self) -> socket.socket:
        """Raises HostFailed, which names the address, if the port is in use."""
        family = socket.AF_INET6 if ipaddress.ip_address(self._ip).version == 6 else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_IP, _IP_FREEBIND, 1)
            sock.bind((self._ip, self._port()))
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            what = f"{self._ip}, port {self._port()}: {error.strerror}; another port can be said with --port"
            raise HostFailed(OSError(error.errno, what)) from error
        if not self._port():
            write_atomically(self._port_file, json.dumps(sock.getsockname()[1]).encode())
        return sock

    def _port(self) -> int:
        """The port that was asked for; else the one that was found free at the first start; 0 before that."""
        if self._asked_port:
            return self._asked_port
        try:
            return int(self._port_file.read_text())
        except (FileNotFoundError, ValueError):
            return 0

    # The watch

    def _watch_process(self) -> None:
        while not self._stopped.is_set():
            watched, poller = self._daemon, select.poll()
            poller.register(self._wake, select.POLLIN)
            if watched is not None:
                poller.register(watched, select.POLLIN)
            poller.poll()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            if watched is not None and watched.ended() and self._daemon is not None:  # nobody has asked it to end
                said = daemon.last_lines(self._log_file) or "it said nothing"
                log.warning("the chunk store %s: %s", watched.ending(), said)
                with self._lock:
                    if self._daemon is watched:
                        self._end()
                self._died()


def _unix(path: Path, mode: int) -> socket.socket:
    """A socket bound in one step: who connects finds the old one or the new one."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(fresh))
        sock.listen(_BACKLOG)
        fresh.chmod(mode)
        fresh.rename(fitting(path))
    except BaseException:
        sock.close()
        raise
    return sock
