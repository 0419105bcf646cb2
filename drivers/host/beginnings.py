"""The beginnings of files and devices that may never answer, as those of a disk that dies, or has to spin up first."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

from drivers.errors import CommandFailed, CommandTimedOut, DriverError
from drivers.host.command import run
from drivers.host.watch import Watch

LENGTH = 512
"""Bytes: the smallest sector."""

LIMIT = 5.0
"""Seconds that whoever asks waits at most."""

_LONGEST = 86400.0
"""Seconds after which a process that reads is killed. It may hang in the kernel, and then nothing can end it."""


class Beginnings:
    """Reads each path by one process at a time: who asks while an earlier one hangs waits for nothing."""

    def __init__(self, limit: float = LIMIT) -> None:
        """``limit``: see LIMIT."""
        self._limit = limit
        self._lock = threading.Lock()
        self._asked: dict[Path, _Question] = {}

    def of(self, path: Path) -> str | None:
        """The first LENGTH bytes as text. None: they cannot be read, or not now. Raises OSError, DriverError."""
        with self._lock:
            question = self._asked.get(path)
            if question is None:
                question = _Question(time.monotonic() + self._limit)
                Watch(f"reading-{path.name}", partial(self._ask, path, question)).start()
                self._asked[path] = question
        question.done.wait(max(0, question.deadline - time.monotonic()))
        if question.error is not None:
            raise question.error
        return question.answer

    def _ask(self, path: Path, question: _Question) -> None:
        argv = ["dd", f"if={path}", f"bs={LENGTH}", "count=1", "status=none"]
        try:
            question.answer = run(argv, timeout=_LONGEST).stdout
        except (CommandFailed, CommandTimedOut):
            pass  # it is not there, or has an error there
        except (DriverError, OSError) as error:  # it could not be asked
            question.error = error
        finally:
            with self._lock:
                self._asked.pop(path, None)
            question.done.set()


class _Question:
    """What one process was started for. Others await it until ``deadline``."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.done = threading.Event()
        self.answer: str | None = None
        self.error: Exception | None = None
