"""Processes that the lab starts: waited for, logged to files, ended by their ids and no others."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lab.errors import NotReady

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25
STOP_TIMEOUT = 60.0
"""Seconds that a process has to end after SIGTERM."""


class Service:
    """One process that runs until it is told to stop. Its output goes to ``log_file``."""

    def __init__(self, name: str, argv: Sequence[str | Path], log_file: Path) -> None:
        self.name = name
        self.log_file = log_file
        self._argv = [str(word) for word in argv]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id; the process was started."""
        if self._process is None:
            raise NotReady(f"{self.name} was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process, in a group of its own: a Ctrl-C is for the lab, which then stops things in order.

        Not in a session of its own: sessions share processors as equals, however nice who starts them is (sched(7), The
        autogroup feature).
        """
        with self.log_file.open("ab") as output:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
            )

    def wait_ready(self, ready: Callable[[], bool], timeout: float) -> None:
        """Wait until ``ready()``. Raises NotReady, with the log's end, if it takes too long or the process ends."""
        log.info("awaiting %s, at most %.0f s", self.name, timeout)
        for _ in attempts(timeout):
            if ready():
                return
            if not self.running:
                raise NotReady(f"{self.name} ended: {self.log_tail()}")
        raise NotReady(f"{self.name} is not ready after {timeout:.0f} s: {self.log_tail()}")

    def log_tail(self, lines: int = 15) -> str:
        """The end of the process's output."""
        return f"{self.log_file}:\n" + "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """Ask the process to end; raises NotReady if it had to be killed."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()
            raise NotReady(f"{self.name} did not stop within {STOP_TIMEOUT:.0f} s: {self.log_tail()}") from None

    def kill(self) -> None:
        """SIGKILL to the process, and to nothing else."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def attempts(timeout: float) -> Iterator[None]:
    """Tries with growing pauses between them, for ``timeout`` seconds; at least one."""
    end, pause, clock = time.monotonic() + timeout, FIRST_PAUSE, threading.Event()
    while True:
        yield
        if time.monotonic() >= end:
            return
        clock.wait(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def processes_of(folder: Path) -> dict[int, str]:
    """Command line, by process id, of the processes that were told to use something below ``folder``."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if int(entry.name) != os.getpid() and any(w == str(folder) or f"{folder}/" in w for w in words):
                found[int(entry.name)] = " ".join(words).strip()
    return found


def kill_and_wait(pid: int, timeout: float = STOP_TIMEOUT) -> None:
    """SIGKILL to a process that is no child of ours, and wait until it is gone. Already gone is fine."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        wait_ended(fd, pid, timeout)
    finally:
        os.close(fd)


def wait_ended(pidfd: int, pid: int, timeout: float = STOP_TIMEOUT) -> None:
    """Wait until the process of a pidfd has ended. Raises NotReady if it goes on."""
    ended, _, _ = select.select([pidfd], [], [], timeout)
    if not ended:
        raise NotReady(f"process {pid} does not end, {timeout:.0f} s after SIGKILL")
