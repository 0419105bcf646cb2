"""Locks by name."""

from __future__ import annotations

import threading

from testtools import TestCase

from drivers.host.locks import NamedLocks

SOON = 120.0


class NamedLocksTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.locks = NamedLocks()

    def thread(self, target: threading.Thread) -> None:
        self.addCleanup(target.join, SOON)
        target.start()

    def test_different_names_are_held_side_by_side(self) -> None:
        both_inside = threading.Barrier(2, timeout=SOON)

        def inside(name: str) -> None:
            with self.locks.hold(name):
                both_inside.wait()

        threads = [threading.Thread(target=inside, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            self.thread(thread)
        for thread in threads:
            thread.join(SOON)
        self.assertFalse(both_inside.broken)

    def test_the_same_name_is_held_by_one_at_a_time(self) -> None:
        told: list[str] = []

        def work() -> None:
            with self.locks.hold("a"):
                told.append("in")
                # Whoever could be inside as well has all the time that it needs to show.
                pause.wait(0.01)
                told.append("out")

        pause = threading.Event()
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            self.thread(thread)
        for thread in threads:
            thread.join()
        self.assertEqual(["in", "out"] * 8, told)
        self.assertFalse(self.locks.held())

    def test_a_name_is_taken_while_somebody_holds_or_awaits_it(self) -> None:
        with self.locks.hold("a"):
            self.assertTrue(self.locks.taken("a"))
            self.assertFalse(self.locks.taken("b"))
        self.assertFalse(self.locks.taken("a"))

    def test_the_end_of_a_hold_is_told_when_the_lock_is_free(self) -> None:
        told: list[tuple[str, bool]] = []
        locks = NamedLocks(lambda name: told.append((name, locks.taken(name))))
        with locks.hold("a"):
            self.assertEqual([], told)
        self.assertEqual([("a", False)], told)

    def test_who_waits_gets_the_lock_when_it_is_free(self) -> None:
        for hold in (self.locks.hold, self.locks.hold_if_free):
            got = threading.Event()

            def wait(got: threading.Event = got) -> None:
                with self.locks.hold("a"):
                    got.set()

            with hold("a"):
                self.thread(threading.Thread(target=wait))
                self.assertFalse(got.wait(0.05))
            self.assertTrue(got.wait(SOON))

    def test_one_that_is_free_is_held(self) -> None:
        with self.locks.hold_if_free("a") as free:
            self.assertTrue(free)
            with self.locks.hold_if_free("a") as again, self.locks.hold_if_free("b") as other:
                self.assertEqual((False, True), (again, other))
            self.assertTrue(self.locks.taken("a"))
        self.assertFalse(self.locks.held())
