"""Locks by name."""

from __future__ import annotations

import threading

from testtools import TestCase

from virtman.locks import NamedLocks

SOON = 10.0


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
        inside, most, guard = 0, 0, threading.Lock()

        def work() -> None:
            nonlocal inside, most
            for _ in range(50):
                with self.locks.hold("a"):
                    with guard:
                        inside += 1
                        most = max(most, inside)
                    with guard:
                        inside -= 1

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            self.thread(thread)
        for thread in threads:
            thread.join(SOON)
        self.assertEqual(1, most)
        self.assertFalse(self.locks.held())

    def test_who_waits_gets_the_lock_when_it_is_free(self) -> None:
        got = threading.Event()

        def wait() -> None:
            with self.locks.hold("a"):
                got.set()

        with self.locks.hold("a"):
            self.thread(threading.Thread(target=wait))
            self.assertFalse(got.wait(0.05))
        self.assertTrue(got.wait(SOON))

    def test_nothing_is_held_before_and_after(self) -> None:
        self.assertFalse(self.locks.held())
        with self.locks.hold("a"):
            self.assertTrue(self.locks.held())
        self.assertFalse(self.locks.held())

    def test_one_name_may_be_left_out_of_the_question(self) -> None:
        with self.locks.hold("a"):
            self.assertFalse(self.locks.held(but="a"))
            self.assertTrue(self.locks.held(but="b"))

    def test_an_error_inside_frees_the_lock(self) -> None:
        def fail() -> None:
            with self.locks.hold("a"):
                raise KeyError

        self.assertRaises(KeyError, fail)
        self.assertFalse(self.locks.held())
        with self.locks.hold("a"):
            self.assertTrue(self.locks.held())
