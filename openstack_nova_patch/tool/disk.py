"""What the tool does to files: all new ones are written beside their places first, then each is put there whole."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openstack_nova_patch.tool.errors import Refused

DRAFT = ".virtman-new"
"""How the name of a file ends that is not in its place yet."""

Step = Callable[[str], None]
"""Called with the name of a step before it is done; tests end the run in it."""


def no_step(_name: str) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class Owner:
    """Who a file is given to, and its permissions."""

    uid: int
    gid: int
    mode: int


@dataclass(frozen=True)
class NewFile:
    """What a file is to hold, and whose it is to be."""

    path: Path
    content: bytes
    owner: Owner


def owner_of(path: Path) -> Owner:
    """Of a file or folder that there is."""
    found = path.stat()
    return Owner(found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode))


def digest(content: bytes) -> str:
    """What checksums.json knows the content of a file by."""
    return hashlib.sha256(content).hexdigest()


def draft_of(path: Path) -> Path:
    """Where a file is written before it is put in its place."""
    return path.with_name(f".{path.name}{DRAFT}")


def put(files: Sequence[NewFile], step: Step = no_step) -> None:
    """Put all files in their places, in this order; others find the old or the new one, also after a power cut.

    Raises OSError, and has changed nothing then if not all could be written: the disk is full, or cannot be written to.
    """
    try:
        for file in files:
            step(f"write {file.path}")
            _write_draft(file)
        for file in files:
            step(f"put {file.path}")
            draft_of(file.path).replace(file.path)
            sync_folder(file.path.parent)
    except OSError:
        for file in files:
            draft_of(file.path).unlink(missing_ok=True)
        raise


def _write_draft(file: NewFile) -> None:
    try:
        descriptor = os.open(draft_of(file.path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as draft:
            draft.write(file.content)
            draft.flush()
            give(descriptor, file.owner)
            os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file.path)) from None  # of a descriptor the name is a number


def give(descriptor: int, owner: Owner) -> None:
    """Owner first: a change of it clears permissions."""
    present = os.fstat(descriptor)
    if (present.st_uid, present.st_gid) != (owner.uid, owner.gid):
        os.fchown(descriptor, owner.uid, owner.gid)
    os.fchmod(descriptor, owner.mode)


def make_folders(folders: Iterable[Path], owner: Owner) -> None:
    """Make those that are missing; a parent comes before what is in it."""
    for folder in folders:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            give(descriptor, owner)
        finally:
            os.close(descriptor)
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Let the names in this folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """One at a time. The lock is the folder's own, so that no file is left. Raises Refused."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another apply is at work in {folder}") from None
        yield
    finally:
        os.close(descriptor)
