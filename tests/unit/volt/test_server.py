"""The thread that lets leases run out."""

from __future__ import annotations

import threading

from sqlalchemy.exc import OperationalError
from testtools import TestCase

from tests.unit.logs import Logged
from tests.unit.virtman.scene import folder_for
from volt.coordinator import Coordinator
from volt.errors import StoreUnusable
from volt.server import let_leases_run_out, only_volt_on
from volt.store import Store


class FailingCoordinator(Coordinator):
    """Fails as it is told, one error for each call, then has the thread stop."""

    def __init__(self, store: Store, errors: list[Exception], stopping: threading.Event) -> None:
        super().__init__(store)
        self._errors = errors
        self._stopping = stopping
        self.calls = 0

    def expire(self) -> float:
        """Fail."""
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        self._stopping.set()
        return 0.0


class OnlyVoltTest(TestCase):
    def test_an_sqlite_file_has_one_volt_at_a_time(self) -> None:
        url = f"sqlite:///{folder_for(self)}/volt.db"
        for _ in range(2):
            with only_volt_on(url):
                error = self.assertRaises(StoreUnusable, only_volt_on(url).__enter__)
                self.assertIn("another Volt is running on database", str(error))
        with only_volt_on("sqlite://"), only_volt_on("postgresql+psycopg://volt@db/volt"):
            pass


class Never(threading.Event):
    """Nobody has to wait for what a thread waits for: it goes on at once. ``pauses``: how long each was to be."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Do not wait."""
        self.pauses.append(timeout)
        return self.is_set()


class LeasesThread(TestCase):
    """It goes on whatever happens, and says so."""

    def run_with(self, *errors: Exception) -> FailingCoordinator:
        store = Store("sqlite://")
        self.addCleanup(store.close)
        self.stopping = Never()
        coordinator = FailingCoordinator(store, list(errors), self.stopping)
        let_leases_run_out(coordinator, self.stopping)
        return coordinator

    def deaths(self, coordinator: Coordinator) -> float | None:
        return coordinator.metrics.registry.get_sample_value("volt_thread_deaths_total", {"thread": "leases"})

    def test_after_a_fault_it_begins_again_and_is_counted_and_logged(self) -> None:
        logged = Logged(self, "volt.server")
        coordinator = self.run_with(ZeroDivisionError("a fault"), KeyError("another"))
        self.assertEqual((3, 2.0), (coordinator.calls, self.deaths(coordinator)))
        self.assertIn("ZeroDivisionError: a fault", "\n".join(logged.lines))

    def test_a_database_that_is_away_is_waited_for_and_is_no_fault(self) -> None:
        logged = Logged(self, "volt.server")
        coordinator = self.run_with(OperationalError("SELECT", {}, Exception("gone")))
        self.assertEqual((2, 0.0), (coordinator.calls, self.deaths(coordinator)))
        self.assertIn("gone", "\n".join(logged.lines))
        self.assertNotIn("Traceback", "\n".join(logged.lines))
        self.assertEqual([0.0, 1.0, 0.1], self.stopping.pauses)
