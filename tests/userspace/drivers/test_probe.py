"""What a network can do, found out over the loopback device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from testtools import TestCase

from drivers.base import Image, Place, Range, Taken
from drivers.host.watch import Watch
from drivers.transfer.contract import Terms
from drivers.transfer.probe import HEADERS, PAYLOAD, SHORTEST_TRAIN, Arrivals, Probe
from tests.patience import wait_until

MIB = 1 << 20
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
        for each in (receiver, other):
            self.assertEqual(("127.0.0.1", nothing), (each.expect(), each.findings))
        sender = self.probe()
        self.assertEqual("127.0.0.1", sender.offer())
        wait_until(lambda: receiver.link is not None, "trains come before it begins")
        self.assertIsNone(receiver.loss)
        self.during(sender, sender.send)
        wait_until(lambda: receiver.loss is not None, "packets come")
        self.assertEqual((0.0, nothing), (receiver.loss, other.findings))

    def test_what_does_not_come_is_counted(self) -> None:
        receiver = self.probe()
        for number in (5, 6, 9):  # 7 and 8 are lost
            receiver._note(number, 0, 0)
        self.assertEqual(0.4, receiver.loss)

    def test_the_end_of_a_train_shows_what_a_link_carries(self) -> None:
        receiver = self.probe()
        for place in range(SHORTEST_TRAIN - 1):
            receiver._note(1, place + 1, place)
        self.assertIsNone(receiver.link)
        for place in range(120):  # the first 80 at once
            receiver._note(2, place + 1, max(0, place - 80) * 1_000_000)
        self.assertAlmostEqual((PAYLOAD + HEADERS) * 1000, receiver.link or 0, places=3)

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
