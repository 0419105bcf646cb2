"""The stream in which a VM's private data go from one host to another: written and read here, without any I/O.

docs/stream.md is its description. Each piece ends with a checksum of all that came up to it, so a stream that is cut,
altered, or put together from others is told from a whole one at the first wrong piece.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from drivers import digests
from virtman.errors import BadStream, NewerStream
from virtman.names import NAME_PATTERN, TEMPORARY

VERSION = 1
"""It is raised when an older reader would take a stream for something else than it is."""

SECTOR = 512
MOST_DATA = 1 << 20
"""Bytes of a disk in one piece."""

_GREETING = re.compile(rb"virtman-stream ([1-9][0-9]{0,5})\n")
_LONGEST_GREETING = 32
_HEAD = struct.Struct(">BI")
_OFFSET, _RANGE, _INDEX = struct.Struct(">Q"), struct.Struct(">QQ"), struct.Struct(">I")
_HEADER, _SECTION, _DATA, _ZEROS, _END = range(1, 6)
_DIGEST = 16
_MOST_HEADER = 16 << 20
_LARGEST = {
    _HEADER: _MOST_HEADER,
    _SECTION: _INDEX.size,
    _DATA: _OFFSET.size + MOST_DATA,
    _ZEROS: _RANGE.size,
    _END: 0,
}

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
class Begin:
    """What follows belongs to the section of this number."""

    section: int


@dataclass(frozen=True)
class Data:
    """``offset`` in bytes."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + len(self.data)


@dataclass(frozen=True)
class Zeros:
    """``offset`` and ``length`` in bytes."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.length


@dataclass(frozen=True)
class End:
    """Nothing follows."""


Piece = Header | Begin | Data | Zeros | End


class Writer:
    """Makes the bytes of one stream; pieces are to come in the order that docs/stream.md tells."""

    def __init__(self) -> None:
        self._sum = _checksum()
        self._begun = False

    def bytes(self, piece: Piece) -> bytes:
        """A piece as it goes into the stream; the first one with the stream's greeting before it."""
        kind, body = _packed(piece)
        part = _HEAD.pack(kind, len(body)) + body
        if not self._begun:
            part = b"virtman-stream %d\n" % VERSION + part
            self._begun = True
        self._sum.update(part)
        return part + self._sum.digest()


class Reader:
    """Takes the bytes of one stream apart."""

    def __init__(self) -> None:
        self._sum = _checksum()
        self._left = bytearray()
        self._greeted = False
        self._order = _Order()

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The pieces that are whole with these further bytes. Raises BadStream, NewerStream."""
        self._left += data
        if not self._greeted:
            self._greeted = self._greet()
        while self._greeted and (piece := self._next()) is not None:
            self._order.check(piece)
            yield piece
        if self._order.ended and self._left:
            raise BadStream("the stream goes on after its end")

    def finish(self) -> None:
        """No bytes come any more. Raises BadStream if that is too early."""
        if not self._order.ended:
            raise BadStream("the stream is cut off")

    def _greet(self) -> bool:
        greeting, newline, _ = bytes(self._left[:_LONGEST_GREETING]).partition(b"\n")
        found = _GREETING.fullmatch(greeting + newline)
        if found is None:
            if newline or len(greeting) == _LONGEST_GREETING or not b"virtman-stream ".startswith(greeting[:15]):
                raise BadStream("this is no stream of 'virtman send'")
            return False
        if int(found[1]) > VERSION:
            raise NewerStream(f"the stream is of version {int(found[1])}, and this release knows {VERSION}: update it")
        self._take(len(found[0]))
        return True

    def _next(self) -> Piece | None:
        if len(self._left) < _HEAD.size:
            return None
        kind, length = _HEAD.unpack_from(self._left)
        if length > _LARGEST.get(kind, -1):
            raise BadStream("the stream is damaged: a piece is none")
        if len(self._left) < _HEAD.size + length + _DIGEST:
            return None
        body = self._take(_HEAD.size + length)[_HEAD.size :]
        digest = bytes(self._left[:_DIGEST])
        del self._left[:_DIGEST]
        if digest != self._sum.digest():
            raise BadStream("the stream is damaged: a checksum is wrong")
        try:
            return _unpacked(kind, body)
        except struct.error as error:
            raise BadStream(f"the stream is damaged: {error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "JSON"
            raise BadStream(f"the stream has a header that cannot be: {where}: {first['msg']}") from error

    def _take(self, length: int) -> bytes:
        part = bytes(self._left[:length])
        del self._left[:length]
        self._sum.update(part)
        return part


class _Order:
    """Which pieces may come next, and where they may be."""

    def __init__(self) -> None:
        self.ended = False
        self._header: Header | None = None
        self._section = -1
        self._reached = 0

    def check(self, piece: Piece) -> None:
        """Raises BadStream."""
        if self.ended or (self._header is None) != isinstance(piece, Header):
            raise _out_of_order()
        if isinstance(piece, Header):
            _check_sections(piece)
            self._header = piece
        elif isinstance(piece, Begin):
            self._begin(piece)
        elif isinstance(piece, End):
            self._end()
        else:
            self._extend(piece)

    def _begin(self, piece: Begin) -> None:
        assert self._header is not None  # noqa: S101
        if piece.section != self._section + 1 or piece.section >= len(self._header.sections):
            raise _out_of_order()
        self._section, self._reached = piece.section, 0

    def _extend(self, piece: Data | Zeros) -> None:
        assert self._header is not None  # noqa: S101
        size = self._header.sections[self._section].size if self._section >= 0 else 0
        empty = piece.end <= piece.offset
        if empty or piece.offset < self._reached or piece.end > size or piece.offset % SECTOR or piece.end % SECTOR:
            raise _out_of_order()
        self._reached = piece.end

    def _end(self) -> None:
        assert self._header is not None  # noqa: S101
        if self._section + 1 != len(self._header.sections):
            raise _out_of_order()
        self.ended = True


def _out_of_order() -> BadStream:
    return BadStream("the stream is damaged: its pieces are not in order")


def _check_sections(header: Header) -> None:
    """Each section differs from one before it, or from what the receiver has; only the last one is the disk's own."""
    known: set[str | None] = {header.since}
    for section in header.sections:
        last = section is header.sections[-1]
        if section.parent not in known or section.id in known or (section.name is None and not last):
            raise BadStream("the stream is damaged: its sections do not fit together")
        known.add(section.id)
    names = [section.name for section in header.sections]
    if len(set(names)) != len(names):
        raise BadStream("the stream is damaged: two snapshots have one name")


def _packed(piece: Piece) -> tuple[int, bytes]:
    match piece:
        case Header():
            return _HEADER, piece.model_dump_json(exclude_defaults=True).encode()
        case Begin():
            return _SECTION, _INDEX.pack(piece.section)
        case Data():
            return _DATA, _OFFSET.pack(piece.offset) + piece.data
        case Zeros():
            return _ZEROS, _RANGE.pack(piece.offset, piece.length)
        case End():
            return _END, b""


def _unpacked(kind: int, body: bytes) -> Piece:
    if kind == _HEADER:
        return Header.model_validate_json(body)
    if kind == _SECTION:
        return Begin(*_INDEX.unpack(body))
    if kind == _DATA:
        (offset,) = _OFFSET.unpack_from(body)
        return Data(offset, body[_OFFSET.size :])
    if kind == _ZEROS:
        return Zeros(*_RANGE.unpack(body))
    return End()


def _checksum() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_DIGEST, person=b"virtman-stream")
