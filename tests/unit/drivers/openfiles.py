"""Files that this process has open, and one of the kernel's that goes meanwhile: it tells of a process."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def process_file() -> Iterator[str]:
    """It is there within this; after it, a read of one that is open fails, and nobody can open it."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield f"/proc/{process.pid}/stat"
        finally:
            process.kill()


def open_files() -> int:
    """How many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
