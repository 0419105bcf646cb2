"""The one place that runs programs: an argument list, a time limit, both outputs captured and not translated."""

from __future__ import annotations

import logging
import math
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from drivers.errors import CommandFailed, CommandTimedOut, ToolMissing
from drivers.host.watch import Watch

log = logging.getLogger(__name__)

OnLine = Callable[[str], None]
Look = Callable[[], float]
"""What is called while a program runs. Returns the seconds until the next call."""

_UNTRANSLATED = {"LC_ALL": "C.UTF-8", "LANGUAGE": ""}
"""Drivers look for English in messages. gettext heeds LANGUAGE in every locale but "C", which has no UTF-8."""
_CHUNK = 65536
_DYING = 1.0
"""Seconds that a killed program gets to end."""
_LINE_END = re.compile(rb"[\r\n]+")


@dataclass(frozen=True)
class Output:
    """What a program wrote."""

    stdout: str
    stderr: str


def tool(name: str) -> str:
    """The absolute path of a program. Raises ToolMissing."""
    path = shutil.which(name)
    if path is None:
        raise ToolMissing(name)
    return path


def run(argv: Sequence[str], *, timeout: float = 60, on_line: OnLine | None = None, look: Look | None = None) -> Output:
    """Run a program to its end.

    ``on_line`` is called with every line of its standard output as it appears; lines end with a newline or a carriage
    return, because progress meters use the latter. Its standard output is not kept then: there may be gigabytes of it.
    ``timeout`` is in seconds.

    A program that hangs in the kernel, for a disk that does not answer, outlives its kill; it is left behind then.

    Raises ToolMissing, CommandFailed, CommandTimedOut, and whatever ``on_line`` or ``look`` raises: then the program is
    killed.
    """
    deadline = time.monotonic() + timeout
    process = subprocess.Popen(
        [tool(argv[0]), *argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **_UNTRANSLATED},
        start_new_session=True,
    )
    collector = _Collector(process, on_line, look)
    try:
        ended = collector.collect(deadline)
    finally:
        # A program that still runs here was too slow or its reader failed; its children go with it.
        if process.poll() is None and not (collector.complete and _ends(process, deadline)):
            os.killpg(process.pid, signal.SIGKILL)
            ended = False
        _leave(process)
    stdout, stderr = collector.text()
    if not ended or process.returncode != 0:
        log.info("%s: exit code %s: %s", shlex.join(argv), process.returncode, stderr.strip())
    if not ended:
        raise CommandTimedOut(argv, timeout, stdout, stderr)
    if process.returncode != 0:
        raise CommandFailed(argv, process.returncode, stdout, stderr)
    log.debug("ran %s", " ".join(argv))
    return Output(stdout, stderr)


def _ends(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _leave(process: subprocess.Popen[bytes]) -> None:
    """Close its outputs, and await the end of what was killed; if it does not come soon, not here."""
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    if not _ends(process, time.monotonic() + _DYING):
        log.error("process %d was killed and hangs in the kernel: %s", process.pid, process.args)
        Watch(f"reaping-{process.pid}", partial(_reap, process)).start()


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()


class _Collector:
    """Reads both outputs of a process at the same time, so that neither pipe can fill up and block it."""

    def __init__(self, process: subprocess.Popen[bytes], on_line: OnLine | None, look: Look | None) -> None:
        assert process.stdout is not None  # noqa: S101  (both are pipes; tells the type checker so)
        assert process.stderr is not None  # noqa: S101
        self._parts: dict[int, bytearray] = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        self._stdout, self._stderr = self._parts
        self._on_line, self._look = on_line, look
        self._line = b""
        self.complete = False

    def collect(self, deadline: float) -> bool:
        """Read until both outputs are closed; False when the deadline came first."""
        with selectors.DefaultSelector() as selector:
            for fd in self._parts:
                selector.register(fd, selectors.EVENT_READ)
            while selector.get_map():
                patience = math.inf if self._look is None else self._look()
                left = max(0.0, deadline - time.monotonic())
                ready = selector.select(min(left, patience))
                if not ready and left <= patience:
                    return False
                for key, _ in ready:
                    if not self._read(key.fd):
                        selector.unregister(key.fd)
        self.complete = True
        return True

    def _read(self, fd: int) -> bool:
        data = os.read(fd, _CHUNK)
        if fd != self._stdout or self._on_line is None:
            self._parts[fd] += data
        else:
            *lines, self._line = _LINE_END.split(self._line + data)
            if not data and self._line:
                lines.append(self._line)
            for line in filter(None, lines):
                self._on_line(line.decode(errors="replace"))
        return bool(data)

    def text(self) -> tuple[str, str]:
        return self._parts[self._stdout].decode(errors="replace"), self._parts[self._stderr].decode(errors="replace")
