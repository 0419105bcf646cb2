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
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

from drivers.errors import CommandFailed, CommandTimedOut, ToolMissing
from drivers.host.watch import Watch

log = logging.getLogger(__name__)

OnLine = Callable[[str], None]
Check = Callable[[], float]
"""Called while a program runs. Returns the seconds until the next call."""

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


def beside_python(name: str) -> str | None:
    """The absolute path of a program that was installed with the packages of this Python, if it was."""
    return shutil.which(name, path=sysconfig.get_path("scripts"))


def run(
    argv: Sequence[str], *, timeout: float = 60, on_line: OnLine | None = None, check: Check | None = None
) -> Output:
    """Run a program to its end.

    ``on_line`` is called with every line of its standard output as it appears; lines end with a newline or a carriage
    return, because progress meters use the latter. Its standard output is not kept then: there may be gigabytes of it.
    ``timeout`` is in seconds.

    A program that hangs in the kernel, for a disk that does not answer, outlives its kill, and is left behind.

    Raises ToolMissing, CommandFailed, CommandTimedOut, and what ``on_line`` or ``check`` raises: then the program is
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
    stdout, stderr = bytearray(), bytearray()
    ended = False
    try:
        ended = _collect(process, stdout, stderr, deadline, on_line, check) and _ends(process, deadline)
    finally:
        if not ended and process.poll() is None:  # too slow, or its reader failed; its children go with it
            os.killpg(process.pid, signal.SIGKILL)
        _leave(process)
    said, errors = (output.decode(errors="replace") for output in (stdout, stderr))
    if not ended or process.returncode != 0:
        log.info("%s: exit code %s: %s", shlex.join(argv), process.returncode, errors.strip())
    if not ended:
        raise CommandTimedOut(argv, timeout, said, errors)
    if process.returncode != 0:
        raise CommandFailed(argv, process.returncode, said, errors)
    log.debug("ran %s", " ".join(argv))
    return Output(said, errors)


def _collect(
    process: subprocess.Popen[bytes],
    stdout: bytearray,
    stderr: bytearray,
    deadline: float,
    on_line: OnLine | None,
    check: Check | None,
) -> bool:
    """Read both outputs at the same time, so that neither pipe fills up. False if the deadline came before the end."""
    with selectors.DefaultSelector() as selector:
        for pipe, kept, line_reader in ((process.stdout, stdout, on_line), (process.stderr, stderr, None)):
            assert pipe is not None  # noqa: S101  (both are pipes; tells the type checker so)
            selector.register(pipe, selectors.EVENT_READ, partial(_read, pipe, kept, line_reader))
        while selector.get_map():
            patience = math.inf if check is None else check()
            left = max(0.0, deadline - time.monotonic())
            ready = selector.select(min(left, patience))
            if not ready and left <= patience:
                return False
            for key, _ in ready:
                if not key.data():
                    selector.unregister(key.fileobj)
    return True


def _read(pipe: IO[bytes], kept: bytearray, on_line: OnLine | None) -> bool:
    """Read what is there, and hand on whole lines; ``kept`` gets the rest. False at the end."""
    data = os.read(pipe.fileno(), _CHUNK)
    kept += data
    if on_line is not None:
        *lines, kept[:] = _LINE_END.split(kept if data else kept + b"\n")
        for line in filter(None, lines):
            on_line(line.decode(errors="replace"))
    return bool(data)


def _ends(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _leave(process: subprocess.Popen[bytes]) -> None:
    """Close its outputs, and wait a moment for the end of a killed program. A thread waits for one that hangs."""
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    if not _ends(process, time.monotonic() + _DYING):
        log.error("process %d was killed and hangs in the kernel: %s", process.pid, process.args)
        Watch(f"reaping-{process.pid}", partial(_reap, process)).start()


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()
