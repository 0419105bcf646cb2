"""The heartbeat."""

from __future__ import annotations

import queue
from collections.abc import Callable

from testtools import TestCase

from virtman.errors import CoordinatorDown
from virtman.heartbeat import EARLIER, Heartbeat
from volt.client import HeartbeatAnswer

SOON = 120.0
"""Seconds until a test is given up."""
NEVER = 3600.0


def answer(interval: float) -> HeartbeatAnswer:
    return HeartbeatAnswer(interval_s=interval, lease_s=3 * interval, assignments=[], absent=[])


class HeartbeatTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.handled: queue.Queue[HeartbeatAnswer | None] = queue.Queue()

    def start(self, *beats: Callable[[], HeartbeatAnswer]) -> Heartbeat:
        """A heartbeat that gets these answers, then none any more for ever."""
        left = iter(beats)
        heartbeat = Heartbeat(lambda: next(left, lambda: answer(NEVER))(), self.handled.put)
        self.addCleanup(heartbeat.stop)
        heartbeat.start()
        return heartbeat

    def down(self) -> HeartbeatAnswer:
        raise CoordinatorDown("Volt: nobody there")

    def broken(self) -> HeartbeatAnswer:
        raise ZeroDivisionError("a bug")

    def test_the_interval_is_the_one_of_the_answer(self) -> None:
        self.start(lambda: answer(0.01), lambda: answer(0.02), lambda: answer(NEVER))
        seen = [self.handled.get(timeout=SOON) for _ in range(3)]
        self.assertEqual([answer(0.01), answer(0.02), answer(NEVER)], seen)
        self.assertRaises(queue.Empty, self.handled.get, timeout=0.1)

    def test_chance_makes_it_sooner_by_a_part_of_the_interval(self) -> None:
        for chance, pause in ((0.0, 10.0), (0.5, 10.0 - 5 * EARLIER), (1.0, 10.0 - 10 * EARLIER)):
            heartbeat = Heartbeat(lambda: answer(NEVER), self.handled.put, lambda chance=chance: chance)  # type: ignore[misc]
            self.assertEqual(pause, heartbeat.pause(10.0))

    def test_soon_beats_without_waiting(self) -> None:
        heartbeat = self.start()
        self.handled.get(timeout=SOON)
        heartbeat.soon()
        self.assertIsNotNone(self.handled.get(timeout=SOON))

    def test_no_answer_is_noted_and_handed_on_as_none_until_volt_answers_again(self) -> None:
        heartbeat = self.start(self.down)
        self.assertIsNone(self.handled.get(timeout=SOON))
        self.assertEqual((False, "Volt: nobody there"), (heartbeat.connected, heartbeat.trouble))
        heartbeat.soon()
        self.assertEqual(answer(NEVER), self.handled.get(timeout=SOON))
        self.assertEqual((True, None), (heartbeat.connected, heartbeat.trouble))

    def test_a_bug_in_the_beat_does_not_silence_the_host(self) -> None:
        heartbeat = self.start(self.broken, lambda: answer(NEVER))
        self.assertIsNone(self.handled.get(timeout=SOON))
        self.assertEqual("ZeroDivisionError('a bug')", heartbeat.trouble)
        heartbeat.soon()
        self.assertEqual(answer(NEVER), self.handled.get(timeout=SOON))

    def test_a_bug_in_the_handler_does_not_silence_the_host(self) -> None:
        beats: queue.Queue[None] = queue.Queue()

        def handle(_answer: HeartbeatAnswer | None) -> None:
            beats.put(None)
            raise ZeroDivisionError

        heartbeat = Heartbeat(lambda: answer(0.01), handle)
        self.addCleanup(heartbeat.stop)
        heartbeat.start()
        for _ in range(3):
            beats.get(timeout=SOON)
        self.assertTrue(heartbeat.connected)
