"""A file that is there whole, or not at all; nobody but its owner may read it."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from drivers.host.durable import sync
from virtman.errors import BadRequest, FileExists
from virtman.hostfiles import told

_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
"""What opening with O_TMPFILE says where a file system, or the kernel, does not know it (open(2))."""


@dataclass
class NewFile:
    """A file to fill: ``fd`` is open for reading and writing, and ``path`` is its own. ``wanted``: it is to stay."""

    fd: int
    path: Path
    wanted: bool = True


@contextmanager
def new_file(path: Path) -> Iterator[NewFile]:
    """A file that has the name ``path`` once the block has ended well, whole, and only then.

    If this process is killed nothing is left, but for a file system that has no files without names (open(2),
    O_TMPFILE): then a file beside it whose name begins with a dot. Raises BadRequest, FileExists, NoRoom, HostTrouble.
    """
    check_new(path)
    with told(f"writing {path}"):
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
            if file.wanted:
                os.fsync(fd)
                _link(named or Path(f"/proc/self/fd/{fd}"), path)
        finally:
            os.close(fd)
            if named is not None:
                named.unlink(missing_ok=True)


def open_path(fd: int) -> Path:
    """A path by which every program opens what is open here (proc(5))."""
    return Path(f"/proc/{os.getpid()}/fd/{fd}")


def check_new(path: Path) -> None:
    """Raises BadRequest or FileExists if no such file can be made."""
    if not path.parent.is_dir():
        raise BadRequest(f"{path.parent} is not a folder, so there can be no {path.name} in it")
    if os.path.lexists(path):
        raise FileExists(f"{path} exists; remove it first, or name another file")


def _link(source: Path, path: Path) -> None:
    """A name for a file that has none: linkat(2) with AT_SYMLINK_FOLLOW, which Python uses if it is given a folder."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(source, path.name, dst_dir_fd=folder, follow_symlinks=True)
    except FileExistsError:
        check_new(path)  # it was made meanwhile
        raise
    finally:
        os.close(folder)
    sync(path.parent)
