"""The agent's own files: what the operating system says of them becomes one of the agent's errors here.

So whoever undoes what failed catches VirtmanError and DriverError, and nothing escapes it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drivers.errors import FULL
from drivers.host.space import Room
from virtman.errors import HostTrouble, NoRoom


@contextmanager
def translate_os_errors(doing: str) -> Iterator[None]:
    """Raise NoRoom or HostTrouble instead of an OSError. ``doing``: what was tried, with the path."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise NoRoom(f"no space left for {doing}; make room there") from error
        raise HostTrouble(f"{doing}: {error.strerror or error}") from error


def require_room(room: Room, where: Path, needed: int, what: str) -> None:
    """Raise NoRoom if a file or folder ``where`` has no ``needed`` bytes to spare for ``what``; HostTrouble."""
    with translate_os_errors(f"looking for room in {where}"):
        if needed > room.spare(where):
            raise no_room(room, where, what)


def no_room(room: Room, where: Path, what: str) -> NoRoom:
    """The error of a file or folder without room for ``what``. Raises OSError."""
    folder = where if where.is_dir() else where.resolve().parent
    free, kept = shutil.disk_usage(where).free >> 20, room.reserve(where) >> 20
    said = f"no space left in {folder} for {what}: {free} MiB are free"
    if kept:
        said += f", and {kept} MiB are kept for what VMs write (virtman agent --reserve)"
    return NoRoom(f"{said}; make room there")


def data_from(fd: int, offset: int, size: int) -> int:
    """Where data begin at or after an offset (lseek(2)); ``size`` if there are only holes. Raises OSError.

    A block device has no holes.
    """
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return offset
        if error.errno != errno.ENXIO:
            raise
        return size
