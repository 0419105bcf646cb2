"""What is in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path


def matching(folder: Path, name: str, *deeper: str) -> Iterator[Path]:
    """The entries of a folder whose names fit, or what fits ``deeper`` in them; a folder that is not there has none.

    Raises OSError if it cannot look, for want of a file descriptor, say: ``Path.glob`` of Python 3.13 finds nothing
    then.
    """
    try:
        with os.scandir(folder) as entries:
            fitting = sorted(entry.name for entry in entries if fnmatchcase(entry.name, name))
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in map(folder.joinpath, fitting):
        yield from matching(path, *deeper) if deeper else (path,)
