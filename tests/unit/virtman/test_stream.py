"""The stream between two hosts: what is written is read, and nothing else is taken for a stream."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st
from testtools import TestCase

from virtman.errors import BadStream, NewerStream
from virtman.receiving import START
from virtman.records import CRASH, FROZEN, OFF
from virtman.stream import LAST_TIME, Begin, Data, End, Header, Piece, Reader, Section, Writer, Zeros

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


def written(pieces: list[Piece]) -> bytes:
    writer = Writer()
    return b"".join(map(writer.bytes, pieces))


def read(stream: bytes, step: int = 1 << 20) -> list[Piece]:
    reader = Reader()
    found = [piece for at in range(0, len(stream), step) for piece in reader.feed(stream[at : at + step])]
    reader.finish()
    return found


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
def streams(draw: st.DrawFn) -> list[Piece]:
    """A tree of snapshots with what each holds."""
    since = draw(st.sampled_from([None, 100]))
    count = draw(st.integers(1, 4))
    sections = [
        section(n, f"p{n}" if n < count - 1 or draw(st.booleans()) else None, draw(st.sampled_from([since, *range(n)])))
        for n in range(count)
    ]
    found: list[Piece] = [header(*sections, since=since)]
    for number in range(count):
        found += [Begin(number), *draw(contents())]
    return [*found, End()]


class RoundTripTest(TestCase):
    @given(streams(), st.integers(1, 5000))
    def test_what_is_written_is_read_however_it_arrives(self, pieces: list[Piece], step: int) -> None:
        self.assertEqual(pieces, read(written(pieces), step))

    @given(streams(), st.data())
    def test_a_stream_that_is_cut_is_told(self, pieces: list[Piece], data: st.DataObject) -> None:
        stream = written(pieces)
        length = data.draw(st.integers(0, len(stream) - 1))
        self.assertRaises(BadStream, read, stream[:length])

    @given(streams(), st.data())
    def test_a_bit_that_is_flipped_is_told(self, pieces: list[Piece], data: st.DataObject) -> None:
        stream = bytearray(written(pieces))
        stream[data.draw(st.integers(0, len(stream) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        self.assertRaises(BadStream, read, bytes(stream))

    @given(streams(), st.binary(min_size=1, max_size=40))
    def test_what_goes_on_after_the_end_is_told(self, pieces: list[Piece], more: bytes) -> None:
        self.assertRaises(BadStream, read, written(pieces) + more)

    @given(st.binary(max_size=200))
    def test_other_files_are_told(self, other: bytes) -> None:
        self.assertRaises(BadStream, read, other)


class OrderTest(TestCase):
    """Streams with right checksums that no writer of ours makes."""

    def refuse(self, *pieces: Piece) -> None:
        self.assertRaises(BadStream, read, written(list(pieces)))

    def test_pieces_out_of_order(self) -> None:
        data = Data(0, bytes(SECTOR))
        read(written([ONE, Begin(0), data, End()]))
        self.refuse(Begin(0), data, End())
        self.refuse(ONE, ONE, Begin(0), data, End())
        self.refuse(ONE, data, Begin(0), End())
        self.refuse(ONE, Begin(1), End())
        self.refuse(ONE, Begin(0), Begin(0), End())
        self.refuse(ONE, Begin(0), Begin(1), End())
        self.refuse(ONE, End())
        self.refuse(ONE, Begin(0), data, End(), End())

    def test_a_section_that_is_left_out(self) -> None:
        two = header(section(1, "a", None), section(2, "b", 1))
        read(written([two, Begin(0), Begin(1), End()]))
        self.refuse(two, Begin(0), End())
        self.refuse(two, Begin(1), Begin(0), End())
        self.refuse(two, Begin(1), End())

    def test_ranges_that_are_none(self) -> None:
        for odd in (
            Data(SIZE, bytes(SECTOR)),
            Data(0, b""),
            Data(1, bytes(SECTOR)),
            Data(0, bytes(SECTOR + 1)),
            Zeros(0, SIZE + SECTOR),
            Zeros(SECTOR, 0),
            Zeros((1 << 64) - SECTOR, SECTOR),
        ):
            self.refuse(ONE, Begin(0), odd, End())
        self.refuse(ONE, Begin(0), Zeros(SECTOR, SECTOR), Data(0, bytes(SECTOR)), End())
        self.refuse(ONE, Begin(0), Zeros(0, 2 * SECTOR), Zeros(SECTOR, SECTOR), End())
        read(written([ONE, Begin(0), Zeros(0, SIZE - SECTOR), Data(SIZE - SECTOR, bytes(SECTOR)), End()]))

    def test_each_section_has_its_own_size(self) -> None:
        sizes = header(section(1, "a", None, SECTOR), section(2, "b", 1, 2 * SECTOR))
        last = Zeros(SECTOR, SECTOR)
        read(written([sizes, Begin(0), Begin(1), last, End()]))
        self.refuse(sizes, Begin(0), last, Begin(1), End())

    def test_sections_that_do_not_fit_together(self) -> None:
        for odd in (
            header(section(1, "a", 2)),
            header(section(1, "a", None), since=5),
            header(section(1, "a", None), section(1, "b", None)),
            header(section(1, "a", None), section(2, "a", 1)),
            header(section(1, None, None), section(2, "b", 1)),
            header(section(5, "a", 5), since=5),
        ):
            begins = [Begin(number) for number in range(len(odd.sections))]
            self.refuse(odd, *begins, End())


GOOD = {"id": ident(1), "name": "a", "parent": None, "size": SIZE, "taken": 1.5, "state": "off"}


def forged(**odd: object) -> bytes:
    """A stream with right checksums, of one section that has something else in the header."""
    header = json.dumps({"image": IMAGE, "since": None, "sections": [GOOD | odd], "total": 0}).encode()
    stream, checksum = b"virtman-stream 1\n", hashlib.blake2b(digest_size=16, person=b"virtman-stream")
    checksum.update(stream)
    for kind, body in ((1, header), (2, bytes(4)), (5, b"")):
        part = struct.pack(">BI", kind, len(body)) + body
        checksum.update(part)
        stream += part + checksum.digest()
    return stream


HALVES = st.integers(0, 130).map(lambda count: count * SECTOR // 2)


class ForgedTest(TestCase):
    """Sections that nobody's disk has, and whose records would be in the way."""

    def refuse(self, why: str, **odd: object) -> None:
        said = str(self.assertRaises(BadStream, read, forged(**odd)))
        self.assertEqual(1, len(said.splitlines()))
        self.assertIn(f"the stream has a header that cannot be: sections.0.{next(iter(odd))}: ", said)
        self.assertIn(why, said)

    def take(self, **odd: object) -> None:
        self.assertIsInstance(read(forged(**odd))[-1], End)

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
        for size in (0, -SECTOR, 1, SECTOR + 1, (1 << 60) + SECTOR, 1 << 100, 512.5, None, "large"):
            self.refuse("Input should", size=size)
        for size in (SECTOR, 1 << 60):
            self.take(size=size)

    @given(st.integers(-(1 << 64), 1 << 64))
    def test_a_size_is_a_positive_multiple_of_a_sector(self, size: int) -> None:
        if 0 < size <= 1 << 60 and size % SECTOR == 0:
            self.take(size=size)
        else:
            self.refuse("Input should", size=size)

    @given(HALVES, HALVES, HALVES, st.booleans())
    def test_pieces_are_whole_sectors_of_their_section_one_after_the_other(
        self, offset: int, length: int, after: int, zeros: bool
    ) -> None:  # fmt: skip
        piece = Zeros(offset, length) if zeros else Data(offset, bytes(length))
        stream = written([ONE, Begin(0), piece, Zeros(after, SECTOR), End()])
        sound = length and not any(number % SECTOR for number in (offset, length, after))
        if sound and offset + length <= after <= SIZE - SECTOR:
            self.assertIn(piece, read(stream))
        else:
            self.assertRaises(BadStream, read, stream)


class HeaderTest(TestCase):
    def test_a_newer_version_is_told(self) -> None:
        stream = written([ONE, Begin(0), End()]).replace(b" 1\n", b" 2\n", 1)
        self.assertIn("version 2", str(self.assertRaises(NewerStream, read, stream)))

    def test_members_that_are_not_known_are_left_alone(self) -> None:
        class Later(Header):
            colour: str = "blue"

        later = Later(**ONE.model_dump())
        self.assertEqual(ONE, read(written([later, Begin(0), End()]))[0])

    def test_a_piece_that_would_fill_the_memory_is_refused_before_it_is_there(self) -> None:
        for kind, length in ((1, 1 << 30), (3, (1 << 20) + 9), (9, 0)):
            reader = Reader()
            stream = b"virtman-stream 1\n" + struct.pack(">BI", kind, length)
            self.assertRaises(BadStream, list, reader.feed(stream))

    def test_what_is_no_stream_is_told_at_once(self) -> None:
        for other in (b"QFI\xfb", b"virtman-strange", b"virtman-stream 1.5\n", b"virtman-stream " + b"1" * 30):
            self.assertRaises(BadStream, list, Reader().feed(other))
        self.assertEqual([], list(Reader().feed(b"virtman-str")))
