"""Storage daemons: processes that outlive the agent, so that killing or upgrading the agent breaks no read.

A daemon is known by its pid file's path on its command line. Anybody can write such a command line, so the process must
also run as our user, from QEMU's program. A pidfd holds it, so that a reused process id is never taken for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import select
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from drivers.host.command import tool

log = logging.getLogger(__name__)

STOP_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL. A daemon whose parent is gone would wait for its whole reconnect-delay."""

PROGRAM = "qemu-storage-daemon"

LISTEN_FD = 3
"""Where a daemon finds the socket that was bound for it."""

FILE_FD = 4
"""Where a daemon finds the file, or block device, that was opened for it."""

_KILL_GRACE = 30.0
_LOG_TAIL = 4096


class Daemon:
    """One running, or just ended, daemon. ``argv`` is its command line."""

    def __init__(self, pid: int, pidfd: int, argv: Sequence[str]) -> None:
        self.pid, self.argv = pid, tuple(argv)
        self._pidfd = pidfd
        self._status: os.waitid_result | None = None
        self._lock = threading.Lock()

    def __del__(self) -> None:
        os.close(self._pidfd)

    def fileno(self) -> int:
        """Its pidfd: readable when the daemon has ended."""
        return self._pidfd

    def ended(self, timeout: float = 0) -> bool:
        """Whether it has ended, waiting up to ``timeout`` seconds for that. Leaves no zombie."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(timeout * 1000):
            return False
        with self._lock:
            if self._status is None:
                with contextlib.suppress(ChildProcessError):  # an adopted daemon is somebody else's child
                    self._status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        return True

    def bytes_read(self) -> int:
        """Bytes read from files so far, 0 when it has ended; sockets do not count (proc(5), io: rchar)."""
        words = _read(Path(f"/proc/{self.pid}/io")).split()
        return 0 if self.ended() or not words else int(words[1])

    def ending(self) -> str:
        """How it ended, for people."""
        if self._status is None:
            return "ended"
        if self._status.si_code == os.CLD_EXITED:
            return f"ended with exit code {self._status.si_status}"
        return f"was killed by {signal.Signals(self._status.si_status).name}"

    def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL after STOP_GRACE. A killed daemon loses nothing but time."""
        for number, grace in ((signal.SIGTERM, STOP_GRACE), (signal.SIGKILL, _KILL_GRACE)):
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile, which the next line sees
                signal.pidfd_send_signal(self._pidfd, number)
            if self.ended(grace):
                return
            log.info("daemon %d still runs %g s after %s", self.pid, grace, number.name)


def spawn(argv: Sequence[str], log_file: Path, listener: int, file: int | None = None) -> Daemon:
    """Start a daemon in a session of its own, with ``listener`` as file descriptor LISTEN_FD, ``file`` as FILE_FD.

    Raises ToolMissing.
    """
    null = os.open(os.devnull, os.O_RDWR)
    output = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o640)
    handed = []
    try:
        for fd, number in ((listener, LISTEN_FD), (file, FILE_FD)):
            if fd is not None:  # first out of the way: each may be open here under the number of another one
                handed.append((fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FILE_FD + 1), number))
        pid = os.posix_spawn(
            tool(argv[0]),
            list(argv),
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, null, 0),
                (os.POSIX_SPAWN_DUP2, null, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
                # Last, because one of the others may be open under these numbers.
                *((os.POSIX_SPAWN_DUP2, fd, number) for fd, number in handed),
            ],
            setsid=True,
            setsigmask=[],
        )
    finally:
        for fd in (null, output, *(fd for fd, _ in handed)):
            os.close(fd)
    try:
        daemon = Daemon(pid, os.pidfd_open(pid), argv)
    except OSError:  # without a handle nobody would ever stop it, and it would keep the cache's file from the next one
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    log.debug("daemon %d: %s", pid, " ".join(argv))
    return daemon


def running(folder: Path) -> Mapping[str, Daemon]:
    """All our daemons whose pid file is ``<folder>/<name>.pid``, by that name."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (daemon := _adopt(int(entry.name))):
            pid_file = _pid_file(daemon.argv)
            if pid_file is not None and pid_file.parent == folder and pid_file.suffix == ".pid":
                found[pid_file.stem] = daemon
    return found


def last_lines(log_file: Path) -> str:
    """The end of a daemon's log on one line, empty if there is none."""
    try:
        text = log_file.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
    except FileNotFoundError:
        return ""
    return text.replace("\n", " | ").strip(" |")


def _adopt(pid: int) -> Daemon | None:
    process = Path(f"/proc/{pid}")
    if b"--pidfile" not in _read(process / "cmdline"):
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    found = Daemon(pid, pidfd, _read(process / "cmdline").decode(errors="replace").split("\0")[:-1])
    # The process id can have been given to nobody else, and so all of this was read of one process, if it still runs.
    return found if _user(process) == os.geteuid() and _program(process) == PROGRAM and not found.ended() else None


def _user(process: Path) -> int | None:
    """Whose the process is: its effective user (proc(5), status)."""
    for line in _read(process / "status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[2])
    return None


def _program(process: Path) -> str:
    """The name of the file that the process runs, also if an upgrade has replaced it (proc(5), exe)."""
    try:
        return (process / "exe").readlink().name.removesuffix(" (deleted)")
    except OSError:  # it ended, or is another user's
        return ""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def _pid_file(argv: Sequence[str]) -> Path | None:
    for option, value in itertools.pairwise(argv):
        if option == "--pidfile":
            return Path(value)
    return None
