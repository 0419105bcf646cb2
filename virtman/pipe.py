"""A pipe to one caller: a unix socket that is there for one connection.

The bytes of a stream do not go through the HTTP server, which reads the whole body of a request before it calls the
agent. The socket lies beside that of the API, has a random name, and is for the user who asked for it. The agent asks
the kernel for the user that connects: only an agent of root can give the socket to a user, another lets all connect.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from virtman.errors import CallerGone, Interrupted, VirtmanError
from virtman.fdpassing import receive
from virtman.hostfiles import translate_os_errors
from virtman.peer import peer_of

log = logging.getLogger(__name__)

PREFIX = "stream-"
COMES_WITHIN = 60.0
"""Seconds that the caller, who was told of the pipe, has to connect."""

_CHUNK = 1 << 20


class Caller:
    """The caller at the other end, who may read and write as slowly as he likes: only his own call waits for him."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ended: str | None = None

    def end(self, why: str) -> None:
        """End all reading from the caller with an Interrupted that says why. May be called by any thread."""
        self._ended = why
        with contextlib.suppress(OSError):  # he has hung up
            self._sock.shutdown(socket.SHUT_RDWR)

    def write(self, data: bytes) -> None:
        """Send him bytes. Raises CallerGone."""
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise CallerGone(f"the receiver of the stream hung up: {error.strerror or error}") from error

    def chunks(self) -> Iterator[bytes]:
        """What he sends until he ends it. Raises CallerGone, Interrupted."""
        while True:
            try:
                chunk = self._sock.recv(_CHUNK)
            except OSError as error:
                raise CallerGone(f"the sender of the stream hung up: {error.strerror or error}") from error
            if self._ended is not None:  # also if he had sent more: the end of a stream must not overtake who ends it
                raise Interrupted(self._ended)
            if not chunk:
                return
            yield chunk

    @contextmanager
    def passed(self) -> Iterator[int]:
        """The one open file that he passes. Raises BadRequest, CallerGone."""
        fd = receive(self._sock, COMES_WITHIN)
        try:
            yield fd
        finally:
            os.close(fd)


class Callers:
    """Who is sending what others may end, by the name of what it is for. May be used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sending: list[tuple[str, Caller]] = []

    @contextmanager
    def sending(self, name: str, caller: Caller) -> Iterator[None]:
        """The caller may be ended meanwhile."""
        with self._lock:
            self._sending.append((name, caller))
        try:
            yield
        finally:
            with self._lock:
                self._sending.remove((name, caller))

    def end(self, name: str, why: str) -> bool:
        """End all who send for a name. Returns whether there was one."""
        with self._lock:  # held meanwhile, so that no socket is closed, and its number given to another file
            ended = [caller for known, caller in self._sending if known == name]
            for caller in ended:
                caller.end(why)
        return bool(ended)


class Pipe:
    """A socket that listens. ``close`` may be called more than once."""

    def __init__(self, folder: Path, uid: int | None = None) -> None:
        """``uid``: the user that is to connect, by default this one. Raises HostTrouble, NoRoom."""
        self._uid = os.geteuid() if uid is None else uid
        self.path = folder / f"{PREFIX}{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with translate_os_errors(f"making the socket {self.path}"):
            try:
                self._listener.bind(str(self.path))
                self._give()
                self._listener.listen(1)
            except OSError:
                self.close()
                raise

    def _give(self) -> None:
        """Let that user connect."""
        self.path.chmod(0o600)
        if self._uid in (0, os.geteuid()):
            return
        if os.geteuid() == 0:
            os.chown(self.path, self._uid, -1)
        else:
            self.path.chmod(0o666)

    @contextmanager
    def caller(self) -> Iterator[Caller]:
        """The caller, once he has connected. Others are hung up on. Raises CallerGone."""
        try:
            sock = self._accept(time.monotonic() + COMES_WITHIN)
        except OSError as error:
            raise CallerGone(f"nobody connected to {self.path} within {COMES_WITHIN:g} s") from error
        finally:
            self.close()
        with sock:
            yield Caller(sock)

    def _accept(self, until: float) -> socket.socket:
        """Raises OSError."""
        while (left := until - time.monotonic()) > 0:
            self._listener.settimeout(left)
            sock, _ = self._listener.accept()
            try:
                peer = peer_of(sock)
            except OSError:
                sock.close()
                raise
            if peer.uid in (0, self._uid):
                sock.settimeout(None)
                return sock
            log.warning("%s, process %d, is not who was to connect to %s", peer, peer.pid, self.path)
            sock.close()
        raise TimeoutError

    def close(self) -> None:
        self._listener.close()
        self.path.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what a killed agent left."""
    for path in folder.glob(f"{PREFIX}*"):
        path.unlink(missing_ok=True)


class Pump:
    """The caller's end: a thread of its own that copies, while the caller reads what the agent answers.

    ``copy`` gets the connected socket, and ends when there is nothing more to copy.
    """

    def __init__(self, copy: Callable[[socket.socket], None]) -> None:
        self._copy = copy
        self._sock: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def start(self, path: str) -> None:
        """Connect to a pipe and begin. Raises CallerGone if it is gone."""
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.connect(path)
        except OSError as error:
            self._sock.close()
            raise CallerGone(f"the agent does not listen at {path}: {error.strerror or error}") from error
        # A daemon: after an error of the agent it may still wait for input that nobody types.
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        assert self._sock is not None  # noqa: S101
        try:
            self._copy(self._sock)
        except VirtmanError as error:
            self._error = error
        except OSError as error:  # of the socket: the agent hung up, and its answer says why
            log.debug("the agent's pipe: %s", error)
        finally:
            self._sock.close()

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Wait until all is copied. After an error copy no more; what went wrong here first is raised instead of it."""
        if self._thread is not None and self._sock is not None:
            if error is None:
                self._thread.join()
            else:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
        if self._error is not None:
            raise self._error from error


def into(target: BinaryIO, sock: socket.socket) -> None:
    """Copy all that comes. Raises NoRoom, HostTrouble for the target, OSError for the socket."""
    while chunk := sock.recv(_CHUNK):
        rest = memoryview(chunk)
        while rest:  # what is not buffered may take less than all
            with translate_os_errors("writing the stream"):
                rest = rest[target.write(rest) :]
    with translate_os_errors("writing the stream"):
        target.flush()


def out_of(source: BinaryIO, sock: socket.socket) -> None:
    """Copy all that there is; of an unbuffered source each part as soon as it is there. Raises as ``into``."""
    while True:
        with translate_os_errors("reading the stream"):
            chunk = source.read(_CHUNK)
        if not chunk:
            return
        sock.sendall(chunk)
