"""The stream between two hosts: what is written is read, and nothing else is taken for a stream."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st
from testtools import TestCase

from virtman.errors import BadStream
from virtman.receiving import START
from virtman.records import CRASH, FROZEN, OFF
from virtman.stream import (
    DATA,
    END,
    HEADER,
    LAST_TIME,
    SECTION,
    ZEROS,
    Data,
    Header,
    Reader,
    Section,
    Zeros,
    frame,
    write,
)

SECTOR = 512
SIZE = 64 * SECTOR
IMAGE = "sha256:" + "1f" * 32


def ident(number: int) -> str:
    return f"{number:032x}"


def section(number: int, name: str | None, parent: int | None, size: int = SIZE) -> Section:
    return Section(
        id=ident(number), name=name, parent=None if parent is None else ident(parent), size=size, taken=1.5, state="off"
    )


def header(*sections: Section, since: int | None = None) -> Header:
    return Header(image=IMAGE, since=None if since is None else ident(since), sections=sections, total=SIZE)


ONE = header(section(1, "a", None))
Sections = list[list[Data | Zeros]]
"""What each section has."""


def written(header: Header, sections: Sections) -> bytes:
    return b"".join(write(header, sections))


def chunks(stream: bytes, step: int) -> Iterator[bytes]:
    return (stream[at : at + step] for at in range(0, len(stream), step))


def read(stream: bytes, step: int = 1 << 20) -> tuple[Header, Sections]:
    reader = Reader(chunks(stream, step))
    return reader.header, [list(contents) for _section, contents in reader.sections()]


@st.composite
def contents(draw: st.DrawFn) -> list[Data | Zeros]:
    """Pieces of one section."""
    places = sorted(draw(st.sets(st.integers(0, 62), max_size=6)))
    found: list[Data | Zeros] = []
    for place, after in zip(places, [*places[1:], 64], strict=False):
        length = draw(st.integers(1, after - place)) * SECTOR
        byte = draw(st.integers(0, 255))
        zeros = draw(st.booleans())
        found.append(Zeros(place * SECTOR, length) if zeros else Data(place * SECTOR, bytes([byte]) * length))
    return found


@st.composite
def streams(draw: st.DrawFn) -> tuple[Header, Sections]:
    """A tree of snapshots with what each holds."""
    since = draw(st.sampled_from([None, 100]))
    count = draw(st.integers(1, 4))
    sections = [
        section(n, f"p{n}" if n < count - 1 or draw(st.booleans()) else None, draw(st.sampled_from([since, *range(n)])))
        for n in range(count)
    ]
    return header(*sections, since=since), [draw(contents()) for _ in range(count)]


class RoundTripTest(TestCase):
    @given(streams(), st.integers(1, 5000))
    def test_what_is_written_is_read_however_it_arrives(self, stream: tuple[Header, Sections], step: int) -> None:
        self.assertEqual(stream, read(written(*stream), step))

    @given(streams(), st.data())
    def test_a_stream_that_is_cut_or_altered_is_told(
        self, stream: tuple[Header, Sections], data: st.DataObject
    ) -> None:
        whole = written(*stream)
        place = data.draw(st.integers(0, len(whole) - 1))
        self.assertRaises(BadStream, read, whole[:place])
        altered = bytearray(whole)
        altered[place] ^= 1 << data.draw(st.integers(0, 7))
        self.assertRaises(BadStream, read, bytes(altered))
        for step in (len(whole), 1 << 20):  # what goes on after the end comes later, or at once
            self.assertRaises(BadStream, read, whole + whole[: place + 1], step)

    @given(st.binary(max_size=200))
    def test_other_files_are_told(self, other: bytes) -> None:
        self.assertRaises(BadStream, read, other)


def data(offset: int, content: bytes) -> tuple[int, bytes]:
    return DATA, struct.pack(">Q", offset) + content


def zeros(offset: int, length: int) -> tuple[int, bytes]:
    return ZEROS, struct.pack(">QQ", offset, length)


def begin(number: int) -> tuple[int, bytes]:
    return SECTION, struct.pack(">I", number)


def framed(*pieces: tuple[int, bytes] | Header) -> bytes:
    """A stream with right checksums, of pieces that no writer of ours may make; it ends as it should."""
    parts = [(HEADER, p.model_dump_json().encode()) if isinstance(p, Header) else p for p in pieces]
    return b"".join(frame([*parts, (END, b"")]))


class OrderTest(TestCase):
    """Streams with right checksums that no writer of ours makes."""

    def refuse(self, *pieces: tuple[int, bytes] | Header) -> None:
        self.assertRaises(BadStream, read, framed(*pieces))

    def test_pieces_out_of_order(self) -> None:
        sector = data(0, bytes(SECTOR))
        read(framed(ONE, begin(0), sector))
        self.refuse(begin(0), sector)
        self.refuse(ONE, ONE, begin(0), sector)
        self.refuse(ONE, sector, begin(0))
        self.refuse(ONE, begin(1))
        self.refuse(ONE, begin(0), begin(0))
        self.refuse(ONE, begin(0), begin(1))
        self.refuse(ONE)
        self.refuse(ONE, begin(0), sector, (END, b""))

    def test_a_section_that_is_left_out(self) -> None:
        two = header(section(1, "a", None), section(2, "b", 1))
        read(framed(two, begin(0), begin(1)))
        self.refuse(two, begin(0))
        self.refuse(two, begin(1), begin(0))
        self.refuse(two, begin(1))

    def test_ranges_that_are_none(self) -> None:
        for odd in (
            data(SIZE, bytes(SECTOR)),
            data(0, b""),
            data(1, bytes(SECTOR)),
            data(0, bytes(SECTOR + 1)),
            zeros(0, SIZE + SECTOR),
            zeros(SECTOR // 2, SECTOR // 2),
            zeros(0, SECTOR // 2),
            zeros(SECTOR, 0),
            zeros((1 << 64) - SECTOR, SECTOR),
            (DATA, bytes(7)),
            (ZEROS, bytes(15)),
        ):
            self.refuse(ONE, begin(0), odd)
        self.refuse(ONE, begin(0), zeros(SECTOR, SECTOR), data(0, bytes(SECTOR)))
        self.refuse(ONE, begin(0), zeros(0, 2 * SECTOR), zeros(SECTOR, SECTOR))
        read(framed(ONE, begin(0), zeros(0, SIZE - SECTOR), data(SIZE - SECTOR, bytes(SECTOR))))

    def test_each_section_has_its_own_size(self) -> None:
        sizes = header(section(1, "a", None, SECTOR), section(2, "b", 1, 2 * SECTOR))
        last = zeros(SECTOR, SECTOR)
        read(framed(sizes, begin(0), begin(1), last))
        self.refuse(sizes, begin(0), last, begin(1))

    def test_sections_that_do_not_fit_together(self) -> None:
        for odd in (
            header(section(1, "a", 2)),
            header(section(1, "a", None), since=5),
            header(section(1, "a", None), section(1, "b", None)),
            header(section(1, "a", None), section(2, "a", 1)),
            header(section(1, None, None), section(2, "b", 1)),
            header(section(5, "a", 5), since=5),
        ):
            self.refuse(odd, *map(begin, range(len(odd.sections))))


GOOD = {"id": ident(1), "name": "a", "parent": None, "size": SIZE, "taken": 1.5, "state": "off"}


def forged(**odd: object) -> bytes:
    """A stream with right checksums, of one section that has something else in the header."""
    header = json.dumps({"image": IMAGE, "since": None, "sections": [GOOD | odd], "total": 0}).encode()
    return framed((HEADER, header), begin(0))


class ForgedTest(TestCase):
    """Sections that nobody's disk has, and whose records would be in the way."""

    def refuse(self, why: str, **odd: object) -> None:
        said = str(self.assertRaises(BadStream, read, forged(**odd)))
        self.assertEqual(1, len(said.splitlines()))
        self.assertIn(f"the stream has a header that cannot be: sections.0.{next(iter(odd))}: ", said)
        self.assertIn(why, said)

    def take(self, **odd: object) -> None:
        read(forged(**odd))

    def test_times_that_no_date_has(self) -> None:
        for taken in (math.inf, -math.inf, math.nan):
            self.refuse("finite", taken=taken)
        for taken in (1e300, LAST_TIME + 1):
            self.refuse("less than or equal to", taken=taken)
        self.refuse("greater than or equal to", taken=-1)
        for taken in (0, LAST_TIME):
            self.take(taken=taken)
            self.assertEqual(taken, datetime.fromtimestamp(taken, UTC).timestamp())

    def test_states_that_are_no_words(self) -> None:
        for state in ("", "Off", "o f f", "off\n", "\x1b[2J", "-", "a-", "a" * 33):
            self.refuse("String should", state=state)
        for state in (FROZEN, CRASH, OFF, "some-later-one", "a" * 32):
            self.take(state=state)

    def test_names_of_the_agents_own_snapshots(self) -> None:
        for name in (START, "temporary-", "temporary-1f1f"):
            self.refuse("names that begin with temporary- are of the agent's own snapshots", name=name)
        for name in ("moment", "virtman-migration-0", "a-temporary-"):
            self.take(name=name)

    def test_sizes_that_no_disk_has(self) -> None:
        for size in (0, -SECTOR, 1, SECTOR // 2, SECTOR + 1, (1 << 60) + SECTOR, 1 << 100, 512.5, None, "large"):
            self.refuse("Input should", size=size)
        for size in (SECTOR, 1 << 60):
            self.take(size=size)


class HeaderTest(TestCase):
    def test_the_format_is_that_of_the_documentation(self) -> None:
        body = ONE.model_dump_json(exclude_defaults=True).encode()
        stream, checksum = b"virtman-stream 1\n", hashlib.blake2b(digest_size=16, person=b"virtman-stream")
        checksum.update(stream)
        for kind, content in ((1, body), (2, bytes(4)), (3, bytes(8) + b"x" * 512), (4, bytes(15) + b"\1"), (5, b"")):
            part = struct.pack(">BI", kind, len(content)) + content
            checksum.update(part)
            stream += part + checksum.digest()
        self.assertEqual(stream, written(ONE, [[Data(0, b"x" * 512), Zeros(0, 1)]]))

    def test_a_newer_version_is_told(self) -> None:
        stream = written(ONE, [[]]).replace(b" 1\n", b" 2\n", 1)
        self.assertIn("version 2", str(self.assertRaises(BadStream, read, stream)))

    def test_members_that_are_not_known_are_left_alone(self) -> None:
        class Later(Header):
            colour: str = "blue"

        self.assertEqual(ONE, read(written(Later(**ONE.model_dump()), [[]]))[0])

    def test_a_piece_that_would_fill_the_memory_is_refused_before_it_is_there(self) -> None:
        for kind, length in ((1, 1 << 30), (3, (1 << 20) + 9), (9, 0)):
            said = str(self.assertRaises(BadStream, read, b"virtman-stream 1\n" + struct.pack(">BI", kind, length)))
            self.assertIn("a piece is none", said)

    def test_what_is_no_stream_is_told_at_once(self) -> None:
        def silent(begin: bytes) -> Iterator[bytes]:
            yield begin
            self.fail("the reader waits for more")

        for other in (b"QFI\xfb" * 4, b"virtman-strange", b"virtman-stream 1.5\n", b"virtman-stream " + b"1" * 30):
            self.assertIn("no stream", str(self.assertRaises(BadStream, Reader, silent(other))))
