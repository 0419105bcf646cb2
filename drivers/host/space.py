"""Disk space: files that take theirs at once, what is left, and what is kept free for VMs that write.

A copy or stream whose size is known is refused before it begins. Later the room is checked again: by a stream before
each MiB near the reserve, for a copy by a program the sooner the less is left. Only VMs' writes and the last changes of
a live migration take the reserve. The pool of thin volumes grows into the reserve, since VMs write there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from drivers.errors import NoSpace
from drivers.host.descriptors import opened

RESERVE, SHARE, SMALL = 1 << 30, 3, 10
"""Unless the administrator says otherwise, SHARE percent of a file system are kept free, and at least RESERVE bytes, or
of a file system that has less than ten times as many SMALL percent."""


class Room:
    """What caches, images, copies and streams may take of file systems.

    The rest is for VMs' writes: a VM stops when its write meets a full file system. ``state``: the agent's state
    folder, in which VMs' disks are. ``reserve`` in bytes; None: see RESERVE.
    """

    def __init__(self, state: Path, reserve: int | None = None) -> None:
        self._state, self._reserve = state, reserve

    def reserve(self, path: Path) -> int:
        """The bytes to leave free on the file system of a file or folder: none where the agent keeps nothing.

        Raises OSError.
        """
        if path.stat().st_dev not in self._ours():
            return 0
        if self._reserve is not None:
            return self._reserve
        total = shutil.disk_usage(path).total
        return max(total * SHARE // 100, min(RESERVE, total * SMALL // 100))

    def spare(self, path: Path) -> int:
        """The bytes that may still be taken there. Raises OSError."""
        return max(0, shutil.disk_usage(path).free - self.reserve(path))

    def _ours(self) -> set[int]:
        """The file systems of the state folder and of the folders in it, each of which may be mounted."""
        with os.scandir(self._state) as entries:
            return {self._state.stat().st_dev, *(entry.stat().st_dev for entry in entries if entry.is_dir())}


def allocate(file: Path, size: int) -> None:
    """Make the file at least ``size`` bytes long, with all its disk space. What is new in it reads as zeros.

    A file that is long enough may have holes if it was copied: they get their space. Raises NoSpace.
    """
    with opened(file, os.O_RDWR | os.O_CREAT) as fd:
        stat = os.fstat(fd)
        before = stat.st_size
        if before >= size and stat.st_blocks * 512 >= before:
            return
        begin, end = (before, size) if size > before else (0, before)
        try:
            os.posix_fallocate(fd, begin, end - begin)
        except OSError as error:
            os.ftruncate(fd, before)
            if not before:
                file.unlink()
            room = os.statvfs(file.parent)
            raise NoSpace(file, room.f_bavail * room.f_frsize, end - begin) from error


def shortage(folder: Path, needed: int) -> str:
    """The trouble of a file system with VMs' disks that has less than ``needed`` bytes free; empty if it has more."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return str(error)
    if free >= needed:
        return ""
    return f"{folder} has {free >> 20} MiB free; VMs that write stop when it is full"
