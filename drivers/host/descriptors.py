"""Open files by their descriptors, for calls that Python's file objects do not have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def opened(path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o600) -> Iterator[int]:
    """The descriptor of a file, device or folder; ``flags``, ``mode``: see open(2). Raises OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield fd
    finally:
        os.close(fd)
