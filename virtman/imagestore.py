"""The images this host has published: whole raw files, named by their digest.

A raw or qcow2 file is copied in, so that nobody can change an image once it is published, and its digest is computed
over the copy. Neither takes time for holes (but see drivers/digests.py).

Beside the images are manifests (drivers/manifest.py). The chunk store has its own in the same folder, of images that
are only read. An image in place has a manifest once its content was read, if that gave a digest with one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drivers import manifest
from drivers.base import Image
from drivers.digests import BLAKE3, PIECE, ZEROS, Sum
from drivers.host.durable import sync
from drivers.host.folders import matching
from drivers.host.locks import NamedLocks
from drivers.host.space import Room
from virtman.convert import RAW, Content, Progress, convert
from virtman.hostfiles import data_from, translate_os_errors

Total = Sum | manifest.Writer
"""Adds content up, piece by piece, to a digest, which may have a manifest."""


class ImageStore:
    """The folders of published images and of manifests, in the agent's state folder."""

    def __init__(self, state: Path, room: Room) -> None:
        self.folder, self.room = state / "images", room
        self._state = state
        self.lock = threading.Lock()
        """Held while a record begins to refer to content, and while content that no record refers to is deleted."""
        self.publishing = NamedLocks()
        """Held by name while an image is published: no record may refer yet to the content that it brings."""
        for folder in (self.folder, state / manifest.FOLDER):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, image: Image) -> Path:
        return self.folder / f"{image.key}.raw"

    def clean(self) -> None:
        """Remove what interrupted imports left. Call when none runs."""
        for torn in (*self.folder.glob(".import-*"), *(self._state / manifest.FOLDER).glob(f"{manifest.TORN}*")):
            torn.unlink()

    def add(self, name: str, source: Content, progress: Progress, kind: str = BLAKE3) -> Image:
        """Copy a disk in. The same content again costs the copy, and keeps one file.

        ``kind``: that of the digest, if the image has one already.

        Raises NoRoom, HostTrouble, or the content's ``fault``.
        """
        temporary = self.folder / f".import-{name}.raw"
        with translate_os_errors(f"the content of an image in {self.folder}"):
            try:
                convert(source, temporary, RAW, progress, self.room)
                size = temporary.stat().st_size
                with temporary.open("rb") as copy, self.adding_up(kind, size) as total:
                    image = Image(name, size, _digest(copy.fileno(), size, total, progress))
                    os.fsync(copy.fileno())
                    total.keep()
                temporary.rename(self.path(image))
                sync(self.folder)
            finally:
                temporary.unlink(missing_ok=True)
        return image

    @contextmanager
    def adding_up(self, kind: str, size: int) -> Iterator[Total]:
        """What makes a digest of ``size`` bytes, and its manifest, which is gone afterwards unless it is kept.

        Raises OSError.
        """
        if kind == BLAKE3:
            with manifest.writing(self._state, size) as total:
                yield total
        else:
            yield Sum(kind)

    def prove(self, fd: int, size: int, digest: str, progress: Progress) -> str:
        """What open content of ``size`` bytes holds: a digest that proves chunks. Keeps the manifest of ``digest``.

        Raises HostTrouble.
        """
        with translate_os_errors("reading what is to be served in place"), self.adding_up(BLAKE3, size) as total:
            found = _digest(fd, size, total, progress)
            if found == digest:
                total.keep()
        return found

    def remove(self, key: str) -> int:
        """Delete an image's content and manifest. Returns the bytes of disk space freed. Raises HostTrouble."""
        freed = 0
        for path in self._files(key):  # the content first: it always has its manifest
            with translate_os_errors(f"removing {path}"):
                taken = _file_bytes(path)
                if taken is not None:
                    path.unlink()
                    sync(path.parent)
                    freed += taken
        return freed

    def size(self, key: str) -> int:
        """The bytes of disk space that ``remove`` would free."""
        return sum(_file_bytes(path) or 0 for path in self._files(key))

    def keys(self) -> set[str]:
        """Keys of the images with content or a manifest here. Raises HostTrouble."""
        with translate_os_errors(f"reading the images and manifests in {self._state}"):
            return {*(path.stem for path in matching(self.folder, "[!.]*.raw")), *manifest.keys(self._state)}

    def _files(self, key: str) -> tuple[Path, Path]:
        return self.folder / f"{key}.raw", manifest.path_of(self._state, key)


def _file_bytes(path: Path) -> int | None:
    """Disk space the file takes; None if there is none."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return None


def _digest(fd: int, size: int, total: Total, progress: Progress) -> str:
    """The digest of what is open."""
    done = 0
    for piece in _pieces(fd, size):
        total.add(piece)
        done += len(piece)
        if piece is not ZEROS:  # there may be millions of these
            progress("digest", done, size)
    progress("digest", size, size)  # ends if the caller has hung up meanwhile
    return total.digest()


def _pieces(fd: int, size: int) -> Iterator[bytes]:
    """What a file holds. Pieces that are holes are not read (lseek(2), SEEK_DATA)."""
    data = -1
    for offset in range(0, size, PIECE):
        length = min(PIECE, size - offset)
        if data < offset:
            data = data_from(fd, offset, size)
        hole = data >= offset + length
        yield os.pread(fd, length, offset) if not hole else ZEROS if length == PIECE else bytes(length)
