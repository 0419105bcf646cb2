"""What a process runs short of."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import TestCase


@contextmanager
def no_more_files() -> Iterator[None]:
    """Nobody in this process can open anything meanwhile: no file, no socket, no connection (EMFILE)."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # 0 to 2 are always open, and poll(2) may look at three
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def killed_at_its_end(program: str) -> Iterator[None]:
    """Have a program that this process runs meanwhile do its work, and then be killed before it can say so."""
    real, path = shutil.which(program), os.environ["PATH"]
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder) / program
        wrapper.write_text(f'#!/bin/sh\n{real} "$@"\nkill -9 $$\n')
        wrapper.chmod(0o755)
        os.environ["PATH"] = f"{folder}:{path}"
        try:
            yield
        finally:
            os.environ["PATH"] = path


class FileSize:
    """How large a file this process may write; more is refused by the kernel as a full disk would be."""

    def __init__(self, test: TestCase) -> None:
        self._kind = resource.RLIMIT_FSIZE
        self._set = resource.setrlimit
        self._before = resource.getrlimit(self._kind)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        test.addCleanup(signal.signal, signal.SIGXFSZ, handler)
        test.addCleanup(self.lift)

    def to(self, size: int) -> None:
        """Bytes."""
        self._set(self._kind, (size, self._before[1]))

    def lift(self) -> None:
        """As it was."""
        self._set(self._kind, self._before)
