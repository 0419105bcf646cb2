"""What a network can do, found out over the loopback device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from testtools import TestCase

from drivers.base import Image, Place, Range, Taken
from drivers.transfer.probe import LARGEST_SAMPLE, SAMPLE, Probe
from tests.patience import wait_until

MIB = 1 << 20
IMAGE = Image("img", 1024 * MIB, "blake3-64k:1")
OTHER = Image("other", 1024 * MIB, "blake3-64k:2")
HERE = Place(Path("/"), Path("/"), address="127.0.0.1")


class Content:
    """A source that lacks ranges, and notes what is read."""

    def __init__(self, *lacks: Range) -> None:
        self.lacks, self.read = lacks, list[Range]()

    def lacking(self, image: Image) -> Sequence[Range]:
        return self.lacks

    def put(self, image: Image, ranges: Sequence[Range], file: int) -> Taken:
        raise NotImplementedError

    def get(self, image: Image, ranges: Sequence[Range], file: int) -> None:
        os.write(file, b"x")
        self.read.extend(ranges)


class ProbeTest(TestCase):
    def probe(self, content: Content, image: Image = IMAGE) -> Probe:
        probe = Probe(HERE, content, image)
        self.addCleanup(probe.stop)
        return probe

    def test_receivers_hear_the_sender_of_their_image_and_no_other(self) -> None:
        receiver, other = self.probe(Content()), self.probe(Content(), OTHER)
        for each in (receiver, other):
            self.assertEqual(("127.0.0.1", None), (each.expect(), each.loss))
        self.assertEqual("127.0.0.1", self.probe(Content()).offer())
        wait_until(lambda: receiver.loss is not None, "packets come")
        self.assertEqual((0.0, None), (receiver.loss, other.loss))

    def test_what_does_not_come_is_counted(self) -> None:
        receiver = self.probe(Content())
        for number in (5, 6, 9):  # 7 and 8 are lost
            receiver._note(number)
        self.assertEqual(0.4, receiver.loss)

    def test_the_beginning_of_what_is_missing_is_read_once(self) -> None:
        for lacks, sample in (
            ([], []),
            ([Range(MIB, MIB // 2), Range(8 * MIB, MIB)], [Range(MIB, MIB // 2), Range(8 * MIB, SAMPLE - MIB // 2)]),
            ([Range(0, 1024 * MIB)], [Range(0, LARGEST_SAMPLE)]),
        ):
            content = Content(*lacks)
            receiver = self.probe(content)
            receiver.expect()
            self.assertEqual((sample, bool(sample)), (content.read, receiver.rate is not None))
