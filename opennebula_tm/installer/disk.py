"""What the installer does to files: whole or not at all, and never readable or writable by more users than before."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from opennebula_tm.installer.errors import Refused

DRAFT = ".virtman-new"
"""How the name of a file ends that is being written."""


@dataclass(frozen=True)
class Owner:
    """Who a file is given to, and its permissions."""

    uid: int
    gid: int
    mode: int


def owner_of(path: Path) -> Owner:
    """Of a file or folder that there is; links are followed."""
    found = path.stat()
    return Owner(found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode))


def digest(content: bytes) -> str:
    """What our record knows the content of a file by."""
    return hashlib.sha256(content).hexdigest()


def read(path: Path) -> bytes | None:
    """The content, or None if there is no such file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def as_text(content: bytes) -> str:
    """Any bytes as text, from which ``as_bytes`` makes the same bytes."""
    return content.decode("utf-8", "surrogateescape")


def as_bytes(text: str) -> bytes:
    """The way back."""
    return text.encode("utf-8", "surrogateescape")


def write(path: Path, content: bytes, owner: Owner, stage: Path | None = None) -> None:
    """Put the content in the file's place, so that others find the old or the new one, also after a power cut.

    ``stage``: the folder where it is written first. In one of probes every executable file is run, half-written or not.
    """
    target = path.resolve()
    new = _draft(target, stage)
    new.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            _give(file.fileno(), owner)
            os.fsync(file.fileno())
        new.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None  # of a descriptor the name is a number
    finally:
        new.unlink(missing_ok=True)
    sync_folder(target.parent)


def _draft(target: Path, stage: Path | None = None) -> Path:
    return (stage or target.parent) / f".{target.name}{DRAFT}"


def drop_draft(path: Path) -> None:
    """Remove what a run that was killed left of a file that it was writing."""
    _draft(path.resolve()).unlink(missing_ok=True)


def _give(descriptor: int, owner: Owner) -> None:
    """Owner first: a change of it clears permissions."""
    present = os.fstat(descriptor)
    if (present.st_uid, present.st_gid) != (owner.uid, owner.gid):
        os.fchown(descriptor, owner.uid, owner.gid)
    os.fchmod(descriptor, owner.mode)


def make_folder(path: Path, owner: Owner) -> None:
    """One folder; it may be there. It has its owner from the moment on that others see it."""
    if path.exists():
        return
    new = _draft(path)
    new.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _give(descriptor, owner)
    finally:
        os.close(descriptor)
    new.rename(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Let the names in this folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def backup_name(path: Path) -> Path:
    """A free name beside the file."""
    target = path.resolve()
    moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    names = [f"{target.name}.virtman-{moment}{suffix}" for suffix in ("", *(f".{n}" for n in range(1, 100)))]
    for name in names:
        if not os.path.lexists(target.with_name(name)):
            return target.with_name(name)
    raise Refused(f"{target.parent} is full of backups of {target.name}")


def remove_empty(path: Path) -> None:
    """Remove the folder if nothing is in it."""
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """One installer at a time. The lock is the folder's own, so that no file is left. Raises Refused."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        raise Refused(f"there is no folder {folder}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused("another installer is at work") from None
        yield
    finally:
        os.close(descriptor)
