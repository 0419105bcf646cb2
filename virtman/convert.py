"""Copying the whole of a disk into one file of its own, by qemu-img."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from drivers.base import Device
from drivers.errors import CommandFailed
from drivers.host.command import run
from drivers.host.durable import sync
from drivers.qemu.monitor import SETPRIV
from virtman.errors import BadImageFile, BadRequest, FileExists, HostTrouble, NoRoom, VirtmanError
from virtman.hostfiles import told

Progress = Callable[[str, int, int], None]
"""Called with what is done ("copy" or "digest"), bytes done and bytes in all."""

RAW, QCOW2 = "raw", "qcow2"
COPY_TIMEOUT = 6 * 3600.0
"""Seconds."""

_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
"""What opening with O_TMPFILE says where a file system, or the kernel, does not know it (open(2))."""


@dataclass(frozen=True)
class Content:
    """A whole disk. ``name`` is for people; ``location``: how qemu-img opens it; ``size`` of the disk in bytes.

    ``needed``: bytes of disk space that a copy takes at least; ``fault``: what to raise if it cannot be read.
    """

    name: str
    location: tuple[str, ...]
    size: int
    needed: int
    fault: type[VirtmanError] = BadImageFile


def of_device(name: str, device: Device, needed: int = 0) -> Content:
    """What a layer of the agent's own holds. ``needed``: see ``Content``."""
    if device.node is not None:
        location: tuple[str, ...] = ("json:" + json.dumps(device.node),)
    else:
        location = ("-f", RAW, str(device.path))
    return Content(name, location, device.size, needed, HostTrouble)


def convert(content: Content, target: Path, image_format: str, progress: Progress) -> None:
    """Fill ``target``, sparse; the kernel ends the program with this thread (prctl(2), PR_SET_PDEATHSIG).

    Raises NoRoom, or the content's ``fault``.
    """

    def on_line(line: str) -> None:
        # qemu-img -p prints "    (12.34/100%)"
        percent = line.strip().strip("(").partition("/")[0]
        if percent.replace(".", "", 1).isdigit():
            progress("copy", int(content.size * float(percent) / 100), content.size)

    argv = [SETPRIV.name, "--pdeathsig", "KILL", "qemu-img", "convert", "-p", "-O", image_format]
    try:
        run([*argv, *content.location, str(target)], timeout=COPY_TIMEOUT, on_line=on_line)
    except CommandFailed as error:
        if "No space left" in error.stderr:
            raise NoRoom(f"no space left in {target.resolve().parent} while copying {content.name}") from error
        raise content.fault(f"cannot copy {content.name}: {last_line(error.stderr)}") from error


def last_line(text: str) -> str:
    """What a tool said at last."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no reason given"


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file to fill, under a path of its own; it is ``path`` once the block has ended well, whole, and only then.

    If this process is killed nothing is left, but for a file system that has no files without names (open(2),
    O_TMPFILE): then a file beside it whose name begins with a dot. Raises BadRequest, FileExists, NoRoom, HostTrouble.
    """
    check_new(path)
    with told(f"writing {path}"):
        try:
            fd = os.open(path.parent, os.O_RDWR | os.O_TMPFILE, 0o600)
            named = None
        except OSError as error:
            if error.errno not in _NO_NAMELESS_FILES:
                raise
            fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            named = Path(name)
        try:
            yield named or Path(f"/proc/{os.getpid()}/fd/{fd}")
            os.fsync(fd)
            _link(named or Path(f"/proc/self/fd/{fd}"), path)
        finally:
            os.close(fd)
            if named is not None:
                named.unlink(missing_ok=True)


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
