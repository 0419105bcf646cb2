"""Processes that outlive the agent, so that killing or upgrading the agent breaks no read.

Such a process writes a pid file: its number, and when it began, so that another process with the same number is never
taken for it. A pidfd holds it from then on (pidfd_open(2)).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

FIRST_FILE = 3
"""The first descriptor that a process gets of those that are handed to it, as systemd hands them (sd_listen_fds(3))."""

STOP_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL."""

_KILL_GRACE = 30.0
_LOG_TAIL = 4096


class Daemon:
    """One running, or just ended, process."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._status: os.waitid_result | None = None
        self._lock = threading.Lock()

    def __del__(self) -> None:
        os.close(self._pidfd)

    def fileno(self) -> int:
        """Its pidfd: readable when the process has ended."""
        return self._pidfd

    def ended(self, timeout: float = 0) -> bool:
        """Whether it has ended, waiting up to ``timeout`` seconds for that. Leaves no zombie."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(timeout * 1000):
            return False
        with self._lock:
            if self._status is None:
                with contextlib.suppress(ChildProcessError):  # an adopted process is somebody else's child
                    self._status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        return True

    def ending(self) -> str:
        """How it ended, for people."""
        if self._status is None:
            return "ended"
        if self._status.si_code == os.CLD_EXITED:
            return f"ended with exit code {self._status.si_status}"
        return f"was killed by {signal.Signals(self._status.si_status).name}"

    def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL after STOP_GRACE."""
        for number, grace in ((signal.SIGTERM, STOP_GRACE), (signal.SIGKILL, _KILL_GRACE)):
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile, which the next line sees
                signal.pidfd_send_signal(self._pidfd, number)
            if self.ended(grace):
                return
            log.info("process %d still runs %g s after %s", self.pid, grace, number.name)


def spawn(argv: Sequence[str], environment: Mapping[str, str], files: Sequence[int], log_file: Path) -> Daemon:
    """Start a process in a session of its own, with ``files`` as the descriptors from FIRST_FILE on.

    ``argv[0]`` is the path of the program. Raises OSError.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    output = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o640)
    handed: list[int] = []
    try:
        # First out of the way: each may be open here under the number of another one.
        handed += [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FILE + len(files)) for fd in files]
        pid = os.posix_spawn(
            argv[0],
            list(argv),
            dict(environment),
            file_actions=[
                (os.POSIX_SPAWN_DUP2, null, 0),
                (os.POSIX_SPAWN_DUP2, null, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
                # Last, because one of the others may be open under these numbers.
                *((os.POSIX_SPAWN_DUP2, fd, FIRST_FILE + place) for place, fd in enumerate(handed)),
            ],
            setsid=True,
            setsigmask=[],
        )
    finally:
        for fd in (null, output, *handed):
            os.close(fd)
    try:
        daemon = Daemon(pid, os.pidfd_open(pid))
    except OSError:  # without a handle nobody would ever stop it
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    log.debug("process %d: %s", pid, " ".join(argv))
    return daemon


def adopt(pid_file: Path) -> Daemon | None:
    """The process that a pid file names, if it runs."""
    try:
        pid, began = map(int, pid_file.read_text().split())
        daemon = Daemon(pid, os.pidfd_open(pid))
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    # The number can have been given to nobody else since the pidfd was opened, if the process still runs.
    return daemon if _began(pid) == began and not daemon.ended() else None


def last_lines(log_file: Path) -> str:
    """The end of a process's log on one line, empty if there is none."""
    try:
        text = log_file.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
    except FileNotFoundError:
        return ""
    return text.replace("\n", " | ").strip(" |")


def _began(pid: int) -> int | None:
    """When a process began, in ticks since the machine's boot (proc(5), stat, field 22)."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None
