"""The folder with the layers of all qcow2 disks: their files, numbers and rights.

A layer is ``snapshots/.layers/<number>.qcow2``. No two layers of a host have the same number.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from drivers.errors import NoSpace
from drivers.host.descriptors import opened

READING = ".reading-"
"""The name of a folder of links begins so if the links only keep layers while somebody reads them."""

SUFFIX, FRESH = ".qcow2", ".new"
LAYER = re.compile(r"(\d{1,9})\.qcow2", re.ASCII)

_ROOM = 1 << 20
"""Bytes that must be free for an empty layer: it takes 0.3 MB."""


class LayerStore:
    """``disks``: the folder of all disks, in which no VM's name begins with a dot. ``group``: whose members may use
    VMs' disks.
    """

    def __init__(self, disks: Path, group: int | None = None) -> None:
        self.disks, self.folder = disks, disks / ".layers"
        self._group = group

    def file(self, number: int) -> Path:
        return self.folder / f"{number}{SUFFIX}"

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Nobody else changes meanwhile which disk has which layer, or what a disk or a layer is called."""
        return flocked(self.folder)

    def fresh(self) -> Path:
        """A new file to make the next layer in. Its number is higher than those of all layers. Raises NoSpace."""
        self.require_room()
        with self.locked():
            number = 1 + max((int(path.stem) for path in self.folder.iterdir() if path.stem.isdecimal()), default=-1)
            fresh = self.file(number).with_suffix(FRESH)
            fresh.touch()
        return fresh

    def require_room(self) -> None:
        """Raise NoSpace if there is no room for an empty layer."""
        free = shutil.disk_usage(self.folder).free
        if free < _ROOM:
            raise NoSpace(self.folder, free, _ROOM)

    def let_write(self, file: Path) -> None:
        """Let the group's members write to a layer."""
        if self._group is not None:
            os.chown(file, -1, self._group)
            file.chmod(file.stat().st_mode & 0o777 | 0o660)

    def let_read(self, files: Iterable[Path]) -> None:
        """Let the group's members read layers, whose owners stay."""
        if self._group is None:
            return
        for file in files:
            found = file.stat()
            if found.st_gid != self._group:
                os.chown(file, -1, self._group)
                file.chmod(found.st_mode & 0o707 | 0o040)

    def used_beside(self, folder: Path, *, readers: bool = True) -> set[int]:
        """The layers that disks have whose folder is another one. ``readers``: count those who only read, too."""
        found = set[int]()
        for other in self.disks.iterdir():
            if other not in (folder, self.folder) and (readers or not other.name.startswith(READING)):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it goes at this moment; a file
                    found |= {int(path.stem) for path in other.iterdir() if LAYER.fullmatch(path.name)}
        return found


@contextlib.contextmanager
def flocked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder (flock(2))."""
    with opened(folder, os.O_DIRECTORY) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def give_as(model: Path, file: Path) -> None:
    """Give a file the owner, the group and the mode of another one."""
    stat = model.stat()
    if (stat.st_uid, stat.st_gid) != (os.geteuid(), os.getegid()):
        os.chown(file, stat.st_uid, stat.st_gid)
    file.chmod(stat.st_mode & 0o7777)
