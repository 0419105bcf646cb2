"""Files that a caller has opened, with his own rights, and passes to the agent (unix(7), SCM_RIGHTS).

Who calls may change such a file at any time. QEMU's programs do what the header of a qcow2 file says, and open others
that it names, with the agent's rights. So they get no header that others than an administrator can write
(``mine``, ``theirs``). In a raw file there is nothing that they obey.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drivers.host.space import Room
from virtman.errors import BadDevice, BadImageFile, BadRequest, CallerGone
from virtman.hostfiles import data_from, require_room, translate_os_errors
from virtman.newfile import open_path

if TYPE_CHECKING:
    from virtman.convert import Progress

MOST = 253
"""Descriptors in one message (Linux: SCM_MAX_FD). The kernel closes those for which there is no room here."""

_OPEN = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
"""Flags with which no open(2) waits for the other end of a FIFO."""
_CHUNK = 4 << 20


@dataclass(frozen=True)
class Passed:
    """A file that is open here as ``fd``. ``name``: what its owner calls it; ``trusted``: he may do all that we may."""

    fd: int
    name: Path
    trusted: bool

    @property
    def path(self) -> Path:
        return open_path(self.fd)

    @property
    def writable(self) -> bool:
        """Whether it was opened for reading and writing."""
        return _mode(self.fd) == os.O_RDWR


@contextmanager
def opened(path: Path, *, device: bool = False) -> Iterator[int]:
    """A file to be published, open; or also a block ``device``, for writing, too, if it may be: that shows that its
    opener may also have it set read-only. Raises BadImageFile.
    """
    try:
        fd = os.open(path, os.O_RDONLY | _OPEN)
    except FileNotFoundError as error:
        raise BadImageFile(f"{path} is not a file") from error
    except OSError as error:
        raise BadImageFile(f"cannot read {path}: {error.strerror}") from error
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or (device and stat.S_ISBLK(mode))):
            raise BadImageFile(f"{path} is not a file{' and not a block device' if device else ''}")
        if stat.S_ISBLK(mode) and os.geteuid() != 0:  # root need not show anything
            with contextlib.suppress(OSError):
                writable = os.open(open_path(fd), os.O_RDWR | os.O_CLOEXEC)
                os.dup2(writable, fd, inheritable=False)
                os.close(writable)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened_device(path: Path) -> Iterator[int]:
    """A device to be read through the cache, open for reading and writing. Raises BadDevice."""
    try:
        fd = os.open(path, os.O_RDWR | _OPEN)
    except OSError as error:
        raise BadDevice(f"{path} is not read through the cache: {error.strerror}") from error
    try:
        if not stat.S_ISBLK(os.fstat(fd).st_mode):
            raise BadDevice(f"{path} is not read through the cache: it is no block device")
        yield fd
    finally:
        os.close(fd)


def pass_to(path: str, fd: int) -> None:
    """Pass an open file to the agent that listens at a socket. Raises CallerGone if it is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(path)
            socket.send_fds(sock, [b"\0"], [fd])
        except OSError as error:
            raise CallerGone(f"the agent does not listen at {path}: {error.strerror or error}") from error


def receive(sock: socket.socket, within: float) -> int:
    """The one descriptor that a caller passes, to be closed; ``within`` so many seconds. Raises BadRequest, CallerGone.

    After an error none is left open.
    """
    sock.settimeout(within)
    try:
        _data, ancillary, flags, _address = sock.recvmsg(1, socket.CMSG_SPACE(MOST * 4), socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise CallerGone(f"who was to pass a file did not: {error.strerror or error}") from error
    passed = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            passed.frombytes(data[: len(data) - len(data) % passed.itemsize])
    if len(passed) == 1 and not flags & socket.MSG_CTRUNC:
        return passed[0]
    for fd in passed:
        os.close(fd)
    raise BadRequest(f"one open file has to be passed with this call, and {len(passed)} were")


def check_readable(fd: int, name: Path) -> None:
    """Whether who passed it may read it, and it is a file. Raises BadImageFile."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise BadImageFile(f"{name} is not a file")
    check_read(fd, name)


def check_read(fd: int, name: Path) -> None:
    """Whether who passed it may read it. Raises BadImageFile."""
    if _mode(fd) not in (os.O_RDONLY, os.O_RDWR):
        raise BadImageFile(f"{name} was not opened for reading")


def check_writable(fd: int, name: Path) -> None:
    """Whether who passed it may write it, and it is a file that has just been made. Raises BadRequest."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise BadRequest(f"{name} is not a file")
    if _mode(fd) not in (os.O_WRONLY, os.O_RDWR):
        raise BadRequest(f"{name} was not opened for writing")
    if found.st_size or found.st_nlink > 1:
        raise BadRequest(f"{name} is not a new and empty file")


def _mode(fd: int) -> int:
    """How a file was opened; -1 if it can be neither read nor written (open(2), O_PATH)."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    return -1 if flags & os.O_PATH else flags & os.O_ACCMODE


@contextmanager
def mine(passed: Passed, folder: Path, room: Room, progress: Progress | None = None) -> Iterator[Path]:
    """What a caller's file holds, in a file that he cannot change and that has no name. Raises NoRoom, HostTrouble."""
    with translate_os_errors(f"copying {passed.name} to {folder}"), tempfile.TemporaryFile(dir=folder) as copy:
        taken = sum(end - start for start, end in _filled(passed.fd, os.fstat(passed.fd).st_size))
        require_room(room, folder, taken, f"a copy of {passed.name}, which takes {taken >> 20} MiB")
        _copy(passed.fd, copy.fileno(), room, f"a copy of {passed.name}", progress)
        yield open_path(copy.fileno())


@contextmanager
def theirs(passed: Passed, folder: Path, room: Room) -> Iterator[Path]:
    """A file that a caller cannot change; what it holds goes into his if all is well. Raises NoRoom, HostTrouble."""
    with translate_os_errors(f"writing {passed.name}"), tempfile.TemporaryFile(dir=folder) as copy:
        yield open_path(copy.fileno())
        _copy(copy.fileno(), passed.fd, room, str(passed.name))


def _copy(source: int, target: int, room: Room, what: str, progress: Progress | None = None) -> None:
    """All that a file holds now, holes as holes; what is added to it meanwhile, which may be without end, is not.

    Raises NoRoom, OSError.
    """
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    for start, end in _filled(source, size):
        done = os.lseek(target, start, os.SEEK_SET)
        while done < end:
            require_room(room, open_path(target), min(_CHUNK, end - done), what)
            if not (sent := os.sendfile(target, source, done, min(_CHUNK, end - done))):
                break
            done += sent
            if progress is not None:
                progress("read", done, size)


def _filled(source: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file's first ``size`` bytes are no holes (lseek(2)). Raises OSError."""
    end = 0
    while (start := data_from(source, end, size)) < size:
        end = min(size, os.lseek(source, start, os.SEEK_HOLE))
        yield start, end
