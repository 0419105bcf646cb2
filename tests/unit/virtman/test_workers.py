"""Jobs in the background."""

from __future__ import annotations

import threading

from testtools import TestCase

from tests.unit.logs import Logged
from virtman.errors import CoordinatorDown
from virtman.workers import Workers

SOON = 10.0


class WorkersTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.workers = Workers(threads=4)
        self.addCleanup(self.workers.stop)

    def blocked(self, key: str) -> threading.Event:
        """A job that runs until the returned event is set."""
        running, go = threading.Event(), threading.Event()
        self.addCleanup(go.set)

        def job() -> None:
            running.set()
            go.wait(SOON)

        self.workers.submit(key, job)
        self.assertTrue(running.wait(SOON))
        return go

    def test_a_job_runs(self) -> None:
        ran = threading.Event()
        self.workers.submit("a", ran.set)
        self.assertTrue(ran.wait(SOON))

    def test_jobs_of_different_keys_run_side_by_side(self) -> None:
        self.blocked("a")
        ran = threading.Event()
        self.workers.submit("b", ran.set)
        self.assertTrue(ran.wait(SOON))

    def test_a_job_waits_for_the_one_of_the_same_key(self) -> None:
        go, ran = self.blocked("a"), threading.Event()
        self.workers.submit("a", ran.set)
        self.assertFalse(ran.wait(0.05))
        go.set()
        self.assertTrue(ran.wait(SOON))

    def test_only_the_last_of_those_that_wait_runs(self) -> None:
        go, done = self.blocked("a"), threading.Event()
        ran: list[str] = []
        self.workers.submit("a", lambda: ran.append("first"))
        self.workers.submit("a", lambda: ran.append("second"))

        def third() -> None:
            ran.append("third")
            done.set()

        self.workers.submit("a", third)
        go.set()
        self.assertTrue(done.wait(SOON))
        self.assertEqual(["third"], ran)

    def test_a_key_is_busy_while_its_job_runs(self) -> None:
        self.assertFalse(self.workers.busy("a"))
        go = self.blocked("a")
        self.assertTrue(self.workers.busy("a"))
        self.assertFalse(self.workers.busy("b"))
        go.set()
        self.workers.stop()
        self.assertFalse(self.workers.busy("a"))

    def test_a_job_that_fails_is_logged_and_does_not_stop_the_next(self) -> None:
        logged = Logged(self, "virtman.workers")
        ran = threading.Event()

        def fail() -> None:
            raise ValueError("no such luck")

        for _ in range(8):  # more than there are threads
            self.workers.submit("a", fail)
        self.workers.submit("b", ran.set)
        self.assertTrue(ran.wait(SOON))
        self.workers.stop()
        self.assertIn("a failed\nTraceback", "\n".join(logged.lines))

    def test_a_trouble_that_is_expected_is_one_line_of_the_log(self) -> None:
        logged = Logged(self, "virtman.workers")

        ran = threading.Event()

        def fail() -> None:
            ran.set()
            raise CoordinatorDown("Volt: nobody there")

        self.workers.submit("report", fail)
        self.assertTrue(ran.wait(SOON))
        self.workers.stop()
        self.assertEqual(["report: Volt: nobody there"], logged.lines)

    def test_stop_cuts_off_what_takes_too_long(self) -> None:
        logged = Logged(self, "virtman.workers")
        self.blocked("a")
        self.workers.stop()
        self.assertEqual(["cut off: a"], logged.lines)

    def test_stop_waits_for_what_runs(self) -> None:
        go = self.blocked("a")
        stopped = threading.Thread(target=self.workers.stop)
        stopped.start()
        self.addCleanup(stopped.join, SOON)
        stopped.join(0.05)
        self.assertTrue(stopped.is_alive())
        go.set()
        stopped.join(SOON)
        self.assertFalse(stopped.is_alive())
