"""A file that is there whole, or not at all; nobody but its owner may read it."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from drivers.host.descriptors import opened
from drivers.host.durable import sync
from virtman.errors import BadRequest, Conflict
from virtman.hostfiles import translate_os_errors

_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
"""What opening with O_TMPFILE says where a file system, or the kernel, does not know it (open(2))."""
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system without hard links answers, as FAT, exFAT and some network shares are (link(2))."""


@dataclass
class NewFile:
    """A file to fill: ``fd`` is open for reading and writing, and ``path`` is its own."""

    fd: int
    path: Path


@contextmanager
def new_file(path: Path) -> Iterator[NewFile]:
    """A file that has the name ``path`` once the block has ended well, whole, and only then.

    If this process is killed nothing is left, but for a file system that has no files without names (open(2),
    O_TMPFILE): there a file beside it stays, whose name begins with a dot. If that file system has no hard links
    either, an empty file named ``path`` may stay, too. Raises BadRequest, Conflict, NoRoom, HostTrouble.
    """
    check_new(path)
    with translate_os_errors(f"writing {path}"):
        try:
            fd = os.open(path.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
            named = None
        except OSError as error:
            if error.errno not in _NO_NAMELESS_FILES:
                raise
            fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            named = Path(name)
        file = NewFile(fd, named or open_path(fd))
        try:
            yield file
            os.fsync(fd)
            _give_name(fd, named, path)
            sync(path.parent)
        finally:
            os.close(fd)
            if named is not None:
                named.unlink(missing_ok=True)


def open_path(fd: int) -> Path:
    """A path by which every program opens what is open here (proc(5))."""
    return Path(f"/proc/{os.getpid()}/fd/{fd}")


def check_new(path: Path) -> None:
    """Raises BadRequest or Conflict if no such file can be made."""
    if not path.parent.is_dir():
        raise BadRequest(f"{path.parent} is not a folder, so there can be no {path.name} in it")
    if os.path.lexists(path):
        raise Conflict(f"{path} exists; remove it first, or name another file")


def _give_name(fd: int, named: Path | None, path: Path) -> None:
    """Let a file that is whole be ``path``, which nobody else has made meanwhile. ``named``: the name that it has."""
    try:
        try:
            _link(named or Path(f"/proc/self/fd/{fd}"), path)
        except OSError as error:
            if named is None or error.errno not in _NO_HARD_LINKS:
                raise
            _rename(named, path)
    except FileExistsError:
        check_new(path)  # it was made meanwhile
        raise


def _link(source: Path, path: Path) -> None:
    """A name for a file that has none: linkat(2) with AT_SYMLINK_FOLLOW, which Python uses if it is given a folder."""
    with opened(path.parent, os.O_DIRECTORY) as folder:
        os.link(source, path.name, dst_dir_fd=folder, follow_symlinks=True)


def _rename(source: Path, path: Path) -> None:
    """Rename a file over an empty one that is made here: O_EXCL refuses a name that exists, and rename(2) does not."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        source.rename(path)
    except OSError:
        path.unlink(missing_ok=True)
        raise
