"""Files that are whole after a power cut, and folders whose names outlive it (rename(2), fsync(2))."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from drivers.host.descriptors import opened


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` so that after any crash it holds the old or the new content, whole.

    A crash may leave a file in its folder whose name begins with a dot. Nobody but its owner may read the new file.
    """
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).rename(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the content of a file outlive a power cut, or the names in a folder."""
    with opened(path) as fd:
        os.fsync(fd)
