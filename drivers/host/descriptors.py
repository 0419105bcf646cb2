"""Open files by their descriptors, for calls that Python's file objects do not have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def opened(path: Path | str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """The descriptor of a file, device or folder. ``flags``: see open(2); a new file is its owner's. Raises OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
