"""The stream in which a VM's private data go from one host to another: written and read here, without any I/O.

docs/stream.md is its description. Each piece ends with a checksum of all that came up to it, so a stream that is cut,
altered, or put together from others is told from a whole one at the first wrong piece.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from drivers import digests
from virtman.errors import BadStream
from virtman.names import NAME_PATTERN, TEMPORARY

VERSION = 1
"""It is raised when an older reader would take a stream for something else than it is."""

SECTOR = 512
MOST_DATA = 1 << 20
"""Bytes of a disk in one piece."""

_GREETING = re.compile(rb"virtman-stream ([1-9][0-9]{0,5})\n")
_BEGIN = b"virtman-stream "
_LONGEST_GREETING = 32
_HEAD = struct.Struct(">BI")
_OFFSET, _RANGE, _INDEX = struct.Struct(">Q"), struct.Struct(">QQ"), struct.Struct(">I")
HEADER, SECTION, DATA, ZEROS, END = range(1, 6)
"""Kinds of pieces."""
_DIGEST = 16
_LARGEST = {
    HEADER: 16 << 20,
    SECTION: _INDEX.size,
    DATA: _OFFSET.size + MOST_DATA,
    ZEROS: _RANGE.size,
    END: 0,
}
"""Bytes of a piece's body at most, by its kind."""

LAST_TIME = 253_402_214_400
"""Seconds from 1970 to the last day that dates have, 9999-12-31, which time zones may shift by less than a day."""


def _of_others(name: str) -> str:
    if name.startswith(TEMPORARY):
        raise ValueError(f"names that begin with {TEMPORARY} are of the agent's own snapshots")
    return name


Bytes = Annotated[int, Field(ge=0, le=1 << 60, multiple_of=SECTOR)]
Size = Annotated[Bytes, Field(gt=0)]
Name = Annotated[str, Field(pattern=NAME_PATTERN), AfterValidator(_of_others)]
Time = Annotated[float, Field(ge=0, le=LAST_TIME, allow_inf_nan=False)]
State = Annotated[str, Field(pattern=r"^[a-z]+(-[a-z]+)*$", max_length=32)]
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)


class Section(_Part):
    """What one state of the disk has that another one has not: a snapshot's, or, without a ``name``, the disk's own.

    ``parent``: the ``id`` of the snapshot that it differs from, None of the bare image. ``size`` of the disk in bytes;
    ``taken`` in seconds since 1970; ``state`` as in virtman/records.py.
    """

    id: Id
    name: Name | None
    parent: Id | None
    size: Size
    taken: Time
    state: State


class Header(_Part):
    """What a stream has in it. ``image``: the digest of the image that the data lie over.

    ``since``: the ``id`` of the snapshot that the receiver has already. ``total``: bytes of disk that follow; ``data``:
    at most so many of these are data, or 0 if the sender does not know.
    """

    image: Annotated[str, Field(pattern=digests.PATTERN)]
    since: Id | None
    sections: Annotated[tuple[Section, ...], Field(min_length=1, max_length=10_000)]
    total: Bytes
    data: Bytes = 0


@dataclass(frozen=True)
class Data:
    """What the disk holds from ``offset`` on, in bytes."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + len(self.data)


@dataclass(frozen=True)
class Zeros:
    """The disk holds zeros here; ``offset`` and ``length`` in bytes."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.length


Contents = Iterable[Data | Zeros]
"""What belongs to one section, in the order of the offsets."""


def write(header: Header, sections: Iterable[Contents]) -> Iterator[bytes]:
    """The bytes of a stream. ``sections``: the contents of each section of the header."""
    return frame(_pieces_of(header, sections))


def _pieces_of(header: Header, sections: Iterable[Contents]) -> Iterator[tuple[int, bytes]]:
    yield HEADER, header.model_dump_json(exclude_defaults=True).encode()
    for number, contents in enumerate(sections):
        yield SECTION, _INDEX.pack(number)
        for piece in contents:
            if isinstance(piece, Data):
                yield DATA, _OFFSET.pack(piece.offset) + piece.data
            else:
                yield ZEROS, _RANGE.pack(piece.offset, piece.length)
    yield END, b""


def frame(pieces: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """The greeting, and then pieces, each a kind and a body, with their checksums."""
    greeting = _BEGIN + b"%d\n" % VERSION
    checksum = _checksum(greeting)
    yield greeting
    for kind, body in pieces:
        part = _HEAD.pack(kind, len(body)) + body
        checksum.update(part)
        yield part + checksum.digest()


class Reader:
    """Reads one stream. All it does raises BadStream, and as ``chunks``.

    ``chunks``: the bytes of the stream, in parts of any size, each as soon as it is there.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        """Read up to the ``header``. Raises BadStream."""
        self._chunks, self._left = iter(chunks), bytearray()
        self._checksum = _checksum(self._greeting())
        self._ahead = self._piece()
        """The piece that was read last."""
        if self._ahead[0] != HEADER:
            raise _out_of_order()
        self.header = _header(self._ahead[1])

    def sections(self) -> Iterator[tuple[Section, Contents]]:
        """Each section with its contents, which have to be read before the next section."""
        self._ahead = self._piece()
        for number, section in enumerate(self.header.sections):
            self._expect(SECTION, _INDEX.pack(number))
            yield section, self._contents(section.size)
        self._expect(END, b"")
        if self._left or next(self._chunks, b""):
            raise BadStream("the stream goes on after its end")

    def _expect(self, kind: int, body: bytes) -> None:
        if self._ahead != (kind, body):
            raise _out_of_order()

    def _contents(self, size: int) -> Contents:
        """The contents of a section of a disk of this size."""
        reached = 0
        self._ahead = self._piece()
        while self._ahead[0] in (DATA, ZEROS):
            piece = _unpacked(*self._ahead)
            if not reached <= piece.offset < piece.end <= size or piece.offset % SECTOR or piece.end % SECTOR:
                raise _out_of_order()
            reached = piece.end
            yield piece
            self._ahead = self._piece()

    def _greeting(self) -> bytes:
        greeting = self._take(len(_BEGIN))
        while greeting.startswith(_BEGIN) and not greeting.endswith(b"\n") and len(greeting) < _LONGEST_GREETING:
            greeting += self._take(1)
        found = _GREETING.fullmatch(greeting)
        if found is None:
            raise BadStream("this is no stream of 'virtman send'")
        if int(found[1]) > VERSION:
            raise BadStream(f"the stream is of version {int(found[1])}, and this release knows {VERSION}: update it")
        return greeting

    def _piece(self) -> tuple[int, bytes]:
        head = self._take(_HEAD.size)
        kind, length = _HEAD.unpack(head)
        if length > _LARGEST.get(kind, -1):
            raise BadStream("the stream is damaged: a piece is none")
        body = self._take(length)
        self._checksum.update(head)
        self._checksum.update(body)
        if self._take(_DIGEST) != self._checksum.digest():
            raise BadStream("the stream is damaged: a checksum is wrong")
        return kind, body

    def _take(self, length: int) -> bytes:
        while len(self._left) < length:
            chunk = next(self._chunks, b"")
            if not chunk:
                raise BadStream("the stream is cut off")
            self._left += chunk
        part = bytes(self._left[:length])
        del self._left[:length]
        return part


def _unpacked(kind: int, body: bytes) -> Data | Zeros:
    try:
        if kind == ZEROS:
            return Zeros(*_RANGE.unpack(body))
        (offset,) = _OFFSET.unpack_from(body)
        return Data(offset, body[_OFFSET.size :])
    except struct.error as error:
        raise BadStream(f"the stream is damaged: {error}") from error


def _header(body: bytes) -> Header:
    """Each section differs from one before it, or from what the receiver has; only the last one is the disk's own."""
    try:
        header = Header.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "JSON"
        raise BadStream(f"the stream has a header that cannot be: {where}: {first['msg']}") from error
    known: set[str | None] = {header.since}
    for section in header.sections:
        last = section is header.sections[-1]
        if section.parent not in known or section.id in known or (section.name is None and not last):
            raise BadStream("the stream is damaged: its sections do not fit together")
        known.add(section.id)
    names = [section.name for section in header.sections]
    if len(set(names)) != len(names):
        raise BadStream("the stream is damaged: two snapshots have one name")
    return header


def _out_of_order() -> BadStream:
    return BadStream("the stream is damaged: its pieces are not in order")


def _checksum(greeting: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(greeting, digest_size=_DIGEST, person=b"virtman-stream")
