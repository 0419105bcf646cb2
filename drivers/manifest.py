"""The manifest of an image: the names of its chunks, which the image's digest proves.

An image is a list of chunks of 64 KiB; the last one is filled up with zeros. Each chunk is named by its BLAKE3 hash, a
chunk of zeros by 32 zero bytes. The names are in pages of 4096, and the hash of a page is its name. The digest is the
hash of the image's size (64 bits, little-endian) and of the names of the pages.

A manifest's file has the list of the pages' names, zeros up to a multiple of 4096 bytes, the pages one after the other,
and zeros up to a multiple of 512 bytes. The chunk store reads such files, and makes them of images that it fetches
(chunkd/src/manifest.rs).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self

from blake3 import blake3

from drivers.digests import BLAKE3, PIECE, ZEROS, key_of
from drivers.host.durable import sync
from drivers.host.folders import matching

FOLDER = "manifests"
TORN = ".manifest-"
"""What the names of files begin with that are not whole."""

CHUNK = 64 << 10
"""Bytes."""
PAGE = 4096
"""Names."""
NAME = 32
"""Bytes."""
ALIGNMENT, SECTOR = 4096, 512

NAME_OF_ZEROS = bytes(NAME)
_CHUNK_OF_ZEROS = bytes(CHUNK)
_PAGE_BYTES = PAGE * NAME


def path_of(state: Path, key: str) -> Path:
    """The manifest of an image, by its key. ``state``: the agent's state folder."""
    return state / FOLDER / key


def keys(state: Path) -> Iterator[str]:
    """Keys of the images with a manifest. Raises OSError."""
    return (path.name for path in matching(state / FOLDER, key_of(BLAKE3) + 64 * "[0-9a-f]"))


def page_offset(size: int, page: int) -> int:
    """Where a page is in the manifest of an image of ``size`` bytes."""
    return _up(-(-size // (CHUNK * PAGE)) * NAME, ALIGNMENT) + page * _PAGE_BYTES


def length_of(size: int) -> int:
    """The bytes of the manifest of an image of ``size`` bytes."""
    return _up(page_offset(size, 0) + -(-size // CHUNK) * NAME, SECTOR)


def names_of(piece: bytes) -> bytes:
    """The names of the chunks of a piece, one after the other; the last chunk may be shorter."""
    if piece is ZEROS:
        return bytes(PIECE // CHUNK * NAME)
    piece += bytes(-len(piece) % CHUNK)  # which copies nothing if nothing is missing
    view = memoryview(piece)  # whose slices copy nothing; but to compare them is slow
    return b"".join(
        NAME_OF_ZEROS if piece.startswith(_CHUNK_OF_ZEROS, at) else blake3(view[at : at + CHUNK]).digest()
        for at in range(0, len(piece), CHUNK)
    )


class Writer:
    """Writes the manifest of an image of ``size`` bytes to an empty file ``path``, while the image is read once.

    It has one page in memory, and the list of pages: 4 MiB for the largest image.
    """

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file, self._path, self._size = file, path, size
        self._list, self._page, self._digest = bytearray(), bytearray(), ""
        file.truncate(length_of(size))

    def add(self, piece: bytes) -> None:
        """The next ``PIECE`` bytes, or what is left."""
        self._page += names_of(piece)
        if len(self._page) == _PAGE_BYTES:
            self._end_page()

    def digest(self) -> str:
        """The digest of what was added, whose manifest is on the disk then. Call it once."""
        if self._page:
            self._end_page()
        self._write(0, self._list)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._digest = _digest(self._size, self._list)
        return self._digest

    def keep(self) -> None:
        """Have the file be the manifest of the digest."""
        self._path.rename(self._path.with_name(key_of(self._digest)))
        sync(self._path.parent)

    def _end_page(self) -> None:
        if self._page != bytes(len(self._page)):  # else there is a hole
            self._write(page_offset(self._size, len(self._list) // NAME), self._page)
        self._list += blake3(self._page).digest()
        self._page.clear()

    def _write(self, offset: int, data: bytearray) -> None:
        self._file.seek(offset)
        self._file.write(data)


@contextmanager
def writing(state: Path, size: int) -> Iterator[Writer]:
    """A writer in the state folder. What it wrote is gone afterwards, unless it was kept. Raises OSError."""
    fd, temporary = tempfile.mkstemp(dir=state / FOLDER, prefix=TORN)
    path = Path(temporary)
    try:
        with os.fdopen(fd, "wb") as file:
            yield Writer(file, path, size)
    finally:
        path.unlink(missing_ok=True)


class Missing(LookupError):
    """This host does not have the manifest of an image, or a page of it, or what it has is torn."""


class Reader:
    """The manifest of an image on this host. Nothing that its file has is believed unchecked.

    ``pages``: their names.
    """

    def __init__(self, state: Path, digest: str, size: int) -> None:
        """``state``: the agent's state folder; ``digest``, ``size``: those of the image. Raises Missing, OSError."""
        try:
            self._file = path_of(state, key_of(digest)).open("rb")
        except FileNotFoundError as error:
            raise Missing(digest) from error
        self._chunks = -(-size // CHUNK)
        listed = self._file.read(-(-self._chunks // PAGE) * NAME)
        if _digest(size, listed) != digest:
            self._file.close()
            raise Missing(digest)
        self._begin = page_offset(size, 0)
        self.pages = _names_in(listed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def names(self, page: int) -> list[bytes]:
        """The names of the chunks of a page. Raises Missing, OSError."""
        self._file.seek(self._begin + page * _PAGE_BYTES)
        content = self._file.read(min(PAGE, self._chunks - page * PAGE) * NAME)
        if blake3(content).digest() != self.pages[page]:
            raise Missing(page)
        return _names_in(content)


def _names_in(content: bytes) -> list[bytes]:
    return [content[at : at + NAME] for at in range(0, len(content), NAME)]


def _digest(size: int, listed: bytes | bytearray) -> str:
    return BLAKE3 + blake3(size.to_bytes(8, "little") + listed).hexdigest()


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
