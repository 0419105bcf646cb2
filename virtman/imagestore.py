"""The images this host has published: whole raw files, named by their digest.

A raw or qcow2 file is copied in, so that nobody can change an image once it is published, and its digest is computed
over the copy. Neither takes time for holes (but see drivers/digests.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from drivers.base import Image
from drivers.digests import PIECE, ZEROS, Sum, kind_for
from drivers.host.durable import sync
from drivers.host.folders import matching
from drivers.host.locks import NamedLocks
from drivers.host.space import Room
from virtman.convert import RAW, Content, Progress, convert
from virtman.hostfiles import data_from, translate_os_errors


class ImageStore:
    """The folder of published images."""

    def __init__(self, folder: Path, room: Room) -> None:
        self.folder, self.room = folder, room
        self.lock = threading.Lock()
        """Held while a record begins to refer to content, and while content that no record refers to is deleted."""
        self.publishing = NamedLocks()
        """Held by name while an image is published: no record may refer yet to the content that it brings."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, image: Image) -> Path:
        return self.folder / f"{image.key}.raw"

    def clean(self) -> None:
        """Remove what interrupted imports left. Call when none runs."""
        for torn in self.folder.glob(".import-*"):
            torn.unlink()

    def add(self, name: str, source: Content, progress: Progress, kind: str | None = None) -> Image:
        """Copy a disk in. The same content again costs the copy, and keeps one file.

        ``kind``: that of the digest, if the image has one already; else the size says it.

        Raises NoRoom, HostTrouble, or the content's ``fault``.
        """
        temporary = self.folder / f".import-{name}.raw"
        with translate_os_errors(f"the content of an image in {self.folder}"):
            try:
                convert(source, temporary, RAW, progress, self.room)
                size = temporary.stat().st_size
                image = Image(name, size, _digest(temporary, size, kind or kind_for(size), progress))
                temporary.rename(self.path(image))
                sync(self.folder)
            finally:
                temporary.unlink(missing_ok=True)
        return image

    def remove(self, key: str) -> int:
        """Delete an image's content. Returns the bytes of disk space freed. Raises HostTrouble."""
        path = self.folder / f"{key}.raw"
        with translate_os_errors(f"removing {path}"):
            try:
                freed = path.stat().st_blocks * 512
                path.unlink()
            except FileNotFoundError:
                return 0
            sync(self.folder)
            return freed

    def size(self, key: str) -> int:
        """The bytes of disk space that ``remove`` would free."""
        try:
            return (self.folder / f"{key}.raw").stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    def keys(self) -> list[str]:
        """Keys of the images that are here. Raises HostTrouble."""
        with translate_os_errors(f"reading {self.folder}"):
            return [path.stem for path in matching(self.folder, "[!.]*.raw")]


def _digest(path: Path, size: int, kind: str, progress: Progress) -> str:
    """The digest of a copy, which is on the disk then."""
    total, done = Sum(kind), 0
    with path.open("rb") as file:
        for piece in _pieces(file.fileno(), size):
            total.add(piece)
            done += len(piece)
            if piece is not ZEROS:  # there may be millions of these
                progress("digest", done, size)
        os.fsync(file.fileno())
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
