"""Parents that do not answer reads: when one is left, and for whom."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from testtools import TestCase

from drivers.attach.doubts import HANG, INTERVAL, LEAST_INTERVAL, SILENCE, Doubts
from drivers.attach.hangs import REST, Hangs

HUNG, WELL, OTHER = "hung", "well", "other"
SOON, LATELY = 1.0, 10.0
"""Seconds, as docs/architecture.md has them."""


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
        self.reachable: set[str] = set()
        self.again_at = 0.0
        """When TCP tries again."""
        self.left: list[tuple[str, bool]] = []
        self.knocked: list[str] = []
        self.knocking = 0.0
        """How long it takes to learn whether one takes connections."""
        self.waits: list[float] = []
        self.while_waiting: Callable[[], None] = lambda: None
        self.while_asking: Callable[[], None] = lambda: None
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
        self.while_asking()
        return next((each for each in parents if each in self.answer), None)

    def is_silent(self, parent: str, seconds: float) -> bool:
        return parent in self.silent and self.stands_still(parent, seconds)

    def awaits_acknowledgement(self, parent: str) -> bool:
        return parent in self.unacknowledged

    def takes_connections(self, parent: str) -> bool:
        self.knocked.append(parent)
        self.now += self.knocking
        return parent in self.reachable

    def is_asked_again_within(self, parent: str, seconds: float) -> bool:
        return self.now <= self.again_at <= self.now + seconds

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

    def test_just_after_a_silence_it_need_not_rest_and_later_it_must(self) -> None:
        for since, rests in ((LATELY, False), (LATELY + 1, True)):
            host = Host()
            host.answer = {WELL}
            host.hangs.note_silence()
            host.now += since
            host.doubt(60)
            self.assertEqual(([(HUNG, not rests)], rests), (host.left, host.hangs.rests(HUNG)))

    def test_one_that_took_over_and_answered_nothing_since_is_not_left_for_the_one_that_rests(self) -> None:
        self.host.counts = {WELL: 7}
        self.host.doubt(60)
        self.host.up = [HUNG, WELL]
        self.host.still_since, self.host.answer = {WELL: 1000.0}, {HUNG}
        self.host.doubt(5, WELL)
        self.assertEqual([(HUNG, False)], self.host.left)
        self.assertEqual(set(), self.host.asked[-1])
        self.host.counts = {WELL: 8}
        self.host.doubt(5, WELL)
        self.assertEqual((WELL, False), self.host.left[-1])

    def test_it_stays_while_no_other_answers(self) -> None:
        self.host.answer = set()
        self.host.doubt(60)
        self.assertEqual([], self.host.left)
        self.assertFalse(self.host.hangs.rests(HUNG))
        self.assertEqual({INTERVAL}, set(self.host.waits))

    def test_it_stays_if_it_answers_while_another_is_asked(self) -> None:
        self.host.while_asking = self.host.still_since.clear
        self.host.doubt(60)
        self.assertEqual([], self.host.left)
        self.assertFalse(self.host.hangs.rests(HUNG))

    def test_nobody_is_asked_who_stands_still_as_well(self) -> None:
        self.host.still_since[WELL] = 1000.0
        self.host.doubt(2)
        self.assertEqual({frozenset({OTHER})}, set(map(frozenset, self.host.asked)))
        self.assertEqual([], self.host.left)

    def test_a_slow_one_that_answers_before_it_hangs_is_not_doubted_any_more(self) -> None:
        self.host.while_waiting = self.host.still_since.clear
        self.host.doubt(60)
        self.assertEqual(([], []), (self.host.left, self.host.asked))

    def test_one_that_is_no_path_any_more_is_left_without_another(self) -> None:
        self.host.up, self.host.answer = [WELL], set()
        self.host.doubt(60)
        self.assertEqual([(HUNG, False)], self.host.left)
        self.assertEqual(([], []), (self.host.asked, self.host.waits))

    def test_one_whose_host_acknowledges_is_not_left_because_it_can_be_reached(self) -> None:
        self.host.answer, self.host.reachable = set(), {HUNG}
        self.host.doubt(10)
        self.assertEqual(([], []), (self.host.left, self.host.knocked))
        self.assertEqual({INTERVAL}, set(self.host.waits))


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

    def test_it_is_left_for_one_that_rests_as_well(self) -> None:
        self.host.hangs.note(WELL)
        self.host.hangs.note_heir(HUNG, 0)
        self.host.answer = {WELL}
        self.host.doubt(60)
        self.assertEqual([(HUNG, True)], self.host.left)

    def test_one_that_hangs_and_owes_an_acknowledgement_counts_as_silent(self) -> None:
        self.host.silent, self.host.unacknowledged, self.host.answer = set(), {HUNG}, {WELL}
        self.host.doubt(60)
        self.assertEqual([(HUNG, True)], self.host.left)
        self.assertEqual(1000.0 + HANG, self.host.now)

    def test_it_stays_while_nothing_is_better(self) -> None:
        self.host.doubt(60)
        self.assertEqual([], self.host.left)

    def test_it_is_left_after_a_while_once_it_can_be_reached_again_another_on_each_host(self) -> None:
        spreads = self.spreads([HUNG, WELL])
        self.assertTrue(min(spreads) < 0.1 and 0.15 < max(spreads) <= 0.25, str(spreads))

    def test_one_that_others_come_before_is_left_after_them(self) -> None:
        spreads = self.spreads([WELL, HUNG])
        self.assertTrue(0.25 <= min(spreads) < 0.4 and 0.6 < max(spreads) <= 0.75, str(spreads))

    def spreads(self, up: list[str]) -> list[float]:
        """For how long each of many hosts waits before it leaves one."""
        waits: list[float] = []
        for _ in range(100):
            host = Host()
            host.now += SILENCE
            host.up, host.silent, host.reachable = up, {HUNG}, {HUNG}
            host.doubt(60)
            self.assertEqual([(HUNG, True)], host.left)
            waits += host.waits
        self.assertEqual(100, len(waits))
        return waits

    def hear_of_it(self) -> None:
        """It acknowledges what it is asked for, and waits itself."""
        self.host.silent, self.host.answer = set(), {WELL}

    def test_one_that_waits_itself_after_a_silence_does_not_rest_the_first_times(self) -> None:
        began = self.host.now
        self.host.while_waiting = lambda: self.hear_of_it() if self.host.now > began + 2 * LATELY else None
        self.host.doubt(60)
        self.assertEqual(([(HUNG, True)], False), (self.host.left, self.host.hangs.rests(HUNG)))
        for rests in (False, False, True):
            self.host.hangs.note_silence()
            self.hang_again()
            self.assertEqual(((HUNG, not rests), rests), (self.host.left[-1], self.host.hangs.rests(HUNG)))
        self.assertTrue(self.host.hangs.spare(WELL), "another one")
        self.host.now += REST
        self.host.hangs.note_silence()
        self.hang_again()
        self.assertEqual(((HUNG, True), False), (self.host.left[-1], self.host.hangs.rests(HUNG)))

    def hang_again(self) -> None:
        """The parent has answered in between."""
        self.host.still_since = {HUNG: self.host.now - SILENCE}
        self.host.doubt(60)

    def test_a_parent_is_spared_as_often_as_is_told_in_any_minute(self) -> None:
        spared = []
        for seconds in (0, 25, 5, 20, 15, 0):  # the first is 65 s before the fifth
            self.host.now += seconds
            self.host.hangs.note_silence()
            self.host.now += 0.1
            spared.append(self.host.hangs.spare(HUNG))
        self.assertEqual([True, True, True, False, True, False], spared)

    def test_parents_that_wait_for_the_same_after_a_silence_are_left_once_each_and_do_not_rest(self) -> None:
        self.host.up = [HUNG, WELL]
        self.host.while_waiting = self.hear_of_it
        self.host.doubt(60)
        self.host.while_waiting = lambda: None
        for doubted, other in ((WELL, HUNG), (HUNG, WELL)):
            self.host.still_since, self.host.answer = {doubted: self.host.now - SILENCE}, {other}
            self.host.doubt(5, doubted)
        self.assertEqual([(HUNG, True), (WELL, True)], self.host.left)
        self.assertEqual([HUNG, WELL], self.host.hangs.in_order([HUNG, WELL]))

    def test_a_look_that_took_its_time_is_followed_by_the_next_at_once(self) -> None:
        self.host.silent = {HUNG}
        for knocking, pause in ((0.0, INTERVAL), (0.15, INTERVAL - 0.15), (0.24, LEAST_INTERVAL), (2, LEAST_INTERVAL)):
            self.host.waits, self.host.knocking = [], knocking
            self.host.now += HANG
            self.host.doubt(HANG)
            self.assertEqual({round(pause, 3)}, {round(each, 3) for each in self.host.waits})

    def test_tcp_is_waited_for_if_it_tries_again_soon(self) -> None:
        self.host.reachable, self.host.again_at = {HUNG}, self.host.now + SOON
        self.host.while_waiting = lambda: None if self.host.now < self.host.again_at else self.host.still_since.clear()
        self.host.doubt(60)
        self.assertEqual(([], self.host.again_at), (self.host.left, self.host.now))

    def test_tcp_is_not_waited_for_if_it_tries_again_later(self) -> None:
        self.host.reachable, self.host.again_at = {HUNG}, self.host.now + 2 * SOON
        self.host.doubt(60)
        self.assertEqual([(HUNG, True)], self.host.left)
        self.assertLess(self.host.now, self.host.again_at - SOON)

    def test_tcp_is_waited_for_once(self) -> None:
        self.host.reachable, self.host.again_at = {HUNG}, self.host.now + SOON
        self.host.doubt(60)
        self.assertEqual([(HUNG, True)], self.host.left)
        self.assertGreater(self.host.now, self.host.again_at)

    def test_it_stays_if_it_is_heard_of_in_the_meantime(self) -> None:
        self.host.reachable = {HUNG}
        self.host.while_waiting = self.host.still_since.clear
        self.host.doubt(60)
        self.assertEqual([], self.host.left)

    def test_nothing_is_left_by_who_has_to_end_meanwhile(self) -> None:
        self.host.reachable = {HUNG}
        self.host.doubt(0)
        self.assertEqual([], self.host.left)
