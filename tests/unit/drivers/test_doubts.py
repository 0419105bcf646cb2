"""Parents that do not answer reads: when one is left, and for whom."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from testtools import TestCase

from drivers.attach.doubts import HANG, INTERVAL, SILENCE, Doubts
from drivers.attach.hangs import Hangs

HUNG, WELL, OTHER = "hung", "well", "other"


class Host:
    """A host with three parents, as one image sees them, and a clock that goes on by waiting."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.up = [HUNG, WELL, OTHER]
        """In the order in which it reads by them."""
        self.still_since = {HUNG: self.now}
        """Since when none of a parent's reads has come back."""
        self.answer: set[str] = set()
        """Who answers a read that is asked for now."""
        self.asked: list[set[str]] = []
        self.counts: dict[str, int] = {}
        self.silent: set[str] = set()
        self.unacknowledged: set[str] = set()
        self.left: list[tuple[str, bool]] = []
        self.waits: list[float] = []
        self.while_waiting: Callable[[], None] = lambda: None
        self.hangs: Hangs[str] = Hangs(lambda: self.now)

    def doubt(self, seconds: float, parent: str = HUNG) -> None:
        """Doubt a parent until that ends, for so long at most."""
        end = self.now + seconds

        def wait(pause: float) -> bool:
            self.waits.append(pause)
            self.now += pause
            self.while_waiting()
            return self.now >= end

        Doubts("debian", self, self, self.hangs, wait, lambda: self.now).resolve(parent)

    def stands_still(self, parent: str, seconds: float) -> bool:
        return self.now - self.still_since.get(parent, self.now) >= seconds

    def reads(self, parent: str) -> int:
        return self.counts.get(parent, 0)

    def first_that_answers(self, parents: Collection[str]) -> str | None:
        self.asked.append(set(parents))
        return next((each for each in parents if each in self.answer), None)

    def is_silent(self, parent: str, seconds: float) -> bool:
        return parent in self.silent and self.stands_still(parent, seconds)

    def awaits_acknowledgement(self, parent: str) -> bool:
        return parent in self.unacknowledged

    def takes_connections(self, parent: str) -> bool:
        return False

    def is_asked_again_within(self, parent: str, seconds: float) -> bool:
        return False

    def paths(self) -> Sequence[str]:
        return self.up

    def leave(self, parent: str, *, silent: bool) -> None:
        self.left.append((parent, silent))


class DoubtsCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.host = Host()
        self.host.now += SILENCE


class HangTest(DoubtsCase):
    def setUp(self) -> None:
        super().setUp()
        self.host.answer = {WELL}

    def test_it_is_left_for_one_that_answers_and_rests(self) -> None:
        self.host.counts = {WELL: 7}
        self.host.doubt(60)
        self.assertEqual([(HUNG, False)], self.host.left)
        self.assertEqual([{WELL, OTHER}], self.host.asked)
        self.assertEqual(1000.0 + HANG, self.host.now)
        self.assertEqual([WELL, HUNG], self.host.hangs.in_order([HUNG, WELL]))

    def test_it_stays_while_no_other_answers(self) -> None:
        self.host.answer = set()
        self.host.doubt(60)
        self.assertEqual([], self.host.left)
        self.assertFalse(self.host.hangs.rests(HUNG))
        self.assertEqual({INTERVAL}, set(self.host.waits))

    def test_a_slow_one_that_answers_before_it_hangs_is_not_doubted_any_more(self) -> None:
        self.host.while_waiting = self.host.still_since.clear
        self.host.doubt(60)
        self.assertEqual(([], []), (self.host.left, self.host.asked))


class SilenceTest(DoubtsCase):
    def setUp(self) -> None:
        super().setUp()
        self.host.silent = {HUNG}

    def test_it_is_left_at_once_for_one_that_answers_and_does_not_rest(self) -> None:
        self.host.answer = {WELL}
        self.host.doubt(60)
        self.assertEqual([(HUNG, True)], self.host.left)
        self.assertEqual([], self.host.waits)
        self.assertFalse(self.host.hangs.rests(HUNG))

    def test_one_that_hangs_and_owes_an_acknowledgement_counts_as_silent(self) -> None:
        self.host.silent, self.host.unacknowledged, self.host.answer = set(), {HUNG}, {WELL}
        self.host.doubt(60)
        self.assertEqual([(HUNG, True)], self.host.left)
        self.assertEqual(1000.0 + HANG, self.host.now)

    def test_it_stays_while_nothing_is_better(self) -> None:
        self.host.doubt(60)
        self.assertEqual([], self.host.left)
