"""The entries of a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import filter as fitting
from pathlib import Path


def matching(folder: Path, name: str, *deeper: str) -> Iterator[Path]:
    """The entries of a folder whose names match, or what matches ``deeper`` in them; a missing folder has none.

    Raises OSError without a free file descriptor, say, where ``Path.glob`` of Python 3.13 finds nothing.
    """
    return map(Path, _matching(os.fspath(folder), name, *deeper))


def _matching(folder: str, name: str, *deeper: str) -> Iterator[str]:
    """As ``matching``, as text: to make a ``Path`` costs more than to read the folder."""
    try:
        with os.scandir(folder) as entries:
            there = [entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in sorted(fitting(there, name)):
        path = f"{folder}/{entry}"
        yield from _matching(path, *deeper) if deeper else (path,)
