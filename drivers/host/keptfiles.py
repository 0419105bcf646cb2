"""Small files of the kernel that are read again and again, each of which stays open."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection


class KeptFiles:
    """For one thread. To open a file of sysfs costs several times what it costs to read it once more. Their paths are
    text: to make a ``Path`` costs more than either.

    An open file keeps nothing there that it tells of: when that has gone, a read fails (Linux: fs/kernfs/file.c).
    """

    def __init__(self) -> None:
        """None is open yet."""
        self._open: dict[str, int] = {}

    def read(self, path: str) -> str:
        """What the file says now, at most a page. Raises OSError; the next read opens it anew."""
        fd = self._open.get(path)
        if fd is None:
            fd = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, mmap.PAGESIZE, 0).decode()
        except OSError:
            os.close(self._open.pop(path))
            raise

    def keep(self, paths: Collection[str]) -> None:
        """Close the others."""
        for path in self._open.keys() - set(paths):
            os.close(self._open.pop(path))

    def close(self) -> None:
        """Close all."""
        self.keep(())
