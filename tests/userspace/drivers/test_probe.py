"""What a network can do, found out over the loopback device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from testtools import TestCase

from drivers.base import Image, Place, Range, Taken
from drivers.host.watch import Watch
from drivers.transfer import probe
from drivers.transfer.contract import Terms
from drivers.transfer.probe import HEADERS, PAYLOAD, SHORTEST_TRAIN, Arrivals, Probe
from tests.patience import wait_until

MIB = 1 << 20
PER_MILLISECOND = (PAYLOAD + HEADERS) * 1000.0
"""Bytes a second of a train whose packets come a millisecond after each other."""
IMAGE = Image("img", 1024 * MIB, "blake3-64k:1")
OTHER = Image("other", 1024 * MIB, "blake3-64k:2")
HERE = Place(Path("/"), Path("/"), address="127.0.0.1")


class Content:
    """A source that the tree brings ``step`` bytes of, each time that somebody looks."""

    def __init__(self, step: int = 0) -> None:
        self.missing, self.step = 100 * MIB, step

    def lacking(self, image: Image) -> Sequence[Range]:
        self.missing -= self.step
        return [Range(0, self.missing)]

    def put(self, image: Image, ranges: Sequence[Range], file: int) -> Taken:
        raise NotImplementedError

    def get(self, image: Image, ranges: Sequence[Range], file: int) -> None:
        raise NotImplementedError


class ProbeTest(TestCase):
    def probe(self, content: Content | None = None, image: Image = IMAGE) -> Probe:
        probe = Probe(HERE, content or Content(), image)
        self.addCleanup(probe.stop)
        return probe

    def during(self, probe: Probe, act: Callable[[Terms], None]) -> None:
        """Have a part of the transfer begin, and end with the test."""
        thread = Watch("part", lambda: act(Terms(1, [], "", [])))
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(probe.stop)

    def test_receivers_hear_the_sender_of_their_image_and_no_other(self) -> None:
        receiver, other = self.probe(), self.probe(image=OTHER)
        nothing = {"rate": None, "delay": None, "loss": None, "link": None}
        self.assertEqual(["127.0.0.1"] * 2, [receiver.expect(), other.expect()])
        sender = self.probe()
        self.assertEqual("127.0.0.1", sender.offer())
        wait_until(lambda: receiver.link, "trains come before it begins")
        self.assertIsNone(receiver.loss)
        self.during(sender, sender.send)
        wait_until(lambda: receiver.loss is not None, "packets come")
        wait_until(lambda: other.link is not None, "the other has listened for long enough")
        self.assertEqual((0.0, {**nothing, "link": 0.0}), (receiver.loss, other.findings))

    def test_what_does_not_come_is_counted(self) -> None:
        receiver = self.probe()
        for number in (5, 6, 9):  # 7 and 8 are lost
            receiver._note(number, 0, 0)
        self.assertEqual(0.4, receiver.loss)

    def train(self, receiver: Probe, number: int, *milliseconds: float) -> None:
        """Its packets came then."""
        for place, came in enumerate(milliseconds, start=1):
            receiver._note(number, place, int(came * 1_000_000))

    def test_the_end_of_a_train_shows_what_a_link_carries(self) -> None:
        receiver = self.probe()
        self.assertEqual({"rate": None, "delay": None, "loss": None, "link": None}, receiver.findings)
        self.patch(probe, "TRAINS", 1)
        self.patch(probe, "LISTENS", 1000)
        self.train(receiver, 1, *range(SHORTEST_TRAIN - 1))
        self.assertIsNone(receiver.link)
        self.train(receiver, 2, *(max(0, place - 80) for place in range(120)))  # the first 80 came at once
        self.assertAlmostEqual(PER_MILLISECOND, receiver.link or 0, places=3)

    def test_what_came_too_fast_after_a_pause_shows_nothing(self) -> None:
        receiver = self.probe()
        self.patch(probe, "TRAINS", 1)
        self.train(receiver, 1, *(place if place < 30 else max(100, place) for place in range(120)))
        self.assertAlmostEqual(PER_MILLISECOND, receiver.link or 0, places=3)

    def test_one_train_that_met_a_busy_host_does_not_count(self) -> None:
        receiver = self.probe()
        self.patch(probe, "LISTENS", 1000)
        self.train(receiver, 1, *range(120))
        self.train(receiver, 2, *(place / 4 for place in range(120)))
        self.assertIsNone(receiver.link)
        self.train(receiver, 3, *range(120))
        self.assertAlmostEqual(PER_MILLISECOND, receiver.link or 0, places=3)

    def test_who_has_heard_nothing_for_long_waits_for_further_trains_when_one_comes(self) -> None:
        receiver = self.probe()
        self.patch(probe, "LISTENS", 1000)
        receiver._listens = time.monotonic() - 2000
        self.assertEqual(0.0, receiver.link)
        self.train(receiver, 1, *range(120))
        self.assertIsNone(receiver.link)
        receiver._listens -= 2000
        self.assertAlmostEqual(PER_MILLISECOND, receiver.link or 0, places=3)

    def test_what_the_tree_brings_is_measured_until_the_end(self) -> None:
        receiver = self.probe(Content(step=MIB))
        self.during(receiver, receiver.receive)
        wait_until(lambda: receiver.findings["rate"] is not None, "the tree brings something")
        findings = receiver.findings
        self.assertLess(0, findings["rate"] or 0)
        self.assertLess(0, findings["delay"] or 0)

    def test_the_rate_is_that_of_the_second_half(self) -> None:
        arrivals = Arrivals(0)
        for second, missing in enumerate((100, 99, 98, 88, 78), start=1):
            arrivals.note(second, missing)
        self.assertEqual((2, 10.0), (arrivals.delay, arrivals.rate))

    def test_as_long_as_nothing_comes_neither_rate_nor_delay_are_known(self) -> None:
        arrivals = Arrivals(0)
        for second in (1, 2, 3):
            arrivals.note(second, 5)
            self.assertEqual((None, None), (arrivals.rate, arrivals.delay))
        for second in (4, 5):
            arrivals.note(second, 4)
        self.assertEqual((0.0, 4), (arrivals.rate, arrivals.delay))
