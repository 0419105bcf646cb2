"""A program that never outlives the thread that started it."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import IO

from drivers.errors import CommandFailed
from drivers.host.command import tool

log = logging.getLogger(__name__)

_SAID = 4096
"""Bytes of what a program said last that are kept for its error."""


class Program:
    """Context manager: a program that the kernel kills when its thread ends (prctl(2), PR_SET_PDEATHSIG).

    Enter it in the thread that waits for it. So a kill -9 of the agent ends it as well. What it says goes to a file
    without a name, whose end is told if it fails.
    """

    def __init__(
        self, argv: Sequence[str], *, stdin: int = subprocess.DEVNULL, stdout: int = subprocess.DEVNULL
    ) -> None:
        """Nothing runs yet. ``stdin``, ``stdout``: descriptors, which stay the caller's."""
        self._argv, self._stdin, self._stdout = argv, stdin, stdout

    def __enter__(self) -> Program:
        self._said: IO[bytes] = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                [tool("setpriv"), "--pdeathsig", "KILL", tool(self._argv[0]), *self._argv[1:]],
                stdin=self._stdin, stdout=self._stdout, stderr=self._said, env={**os.environ, "LC_ALL": "C.UTF-8"},
            )  # fmt: skip
        except BaseException:
            self._said.close()
            raise
        log.debug("started %s", shlex.join(self._argv))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._process.wait()
        self._said.close()

    def kill(self) -> None:
        """End it, from any thread."""
        self._process.kill()  # does nothing to a program that has ended and was waited for

    def wait(self) -> None:
        """Wait for its end. Raises CommandFailed if that is not a good one."""
        code = self._process.wait()
        if code != 0:
            raise CommandFailed(self._argv, code, "", self.said)

    @property
    def said(self) -> str:
        """The last lines that it wrote to its standard error."""
        size = os.fstat(self._said.fileno()).st_size
        return os.pread(self._said.fileno(), _SAID, max(0, size - _SAID)).decode(errors="replace")
