"""`volt serve`: the thread that evicts silent hosts, and the lock of the database."""

from __future__ import annotations

import threading

from sqlalchemy.exc import OperationalError
from testtools import TestCase

from tests.unit.logs import Logged
from tests.unit.virtman.scene import folder_for
from volt.coordinator import Coordinator
from volt.errors import VoltError
from volt.server import expire_leases, only_volt_on
from volt.store import Store


class OnlyVoltTest(TestCase):
    def test_an_sqlite_file_has_one_volt_at_a_time(self) -> None:
        url = f"sqlite:///{folder_for(self)}/volt.db"
        for _ in range(2):
            with only_volt_on(url):
                error = self.assertRaises(VoltError, only_volt_on(url).__enter__)
                self.assertIn("another Volt is running on database", str(error))
        with only_volt_on("sqlite://"), only_volt_on("postgresql+psycopg://volt@db/volt"):
            pass


class Rounds(threading.Event):
    """Passes so many rounds at once, and notes for how long each was to wait."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Do not wait."""
        self.waits.append(timeout)
        return len(self.waits) > self.count


class LeasesThread(TestCase):
    """It goes on after any error, and logs the error."""

    def run_with(self, *errors: Exception) -> tuple[float | None, str]:
        """Returns the faults that the metrics count, and what was logged."""
        logged = Logged(self, "volt.server")
        store = Store("sqlite://")
        self.addCleanup(store.close)
        volt = Coordinator(store)
        left = list(errors)

        def fail() -> None:
            raise left.pop(0)

        self.patch(volt.leases, "expire", fail)
        rounds = Rounds(len(errors))
        expire_leases(volt.leases, volt.metrics, rounds)
        self.assertEqual([], left)
        self.assertEqual({1.0}, set(rounds.waits))
        deaths = volt.metrics.registry.get_sample_value("volt_thread_deaths_total", {"thread": "leases"})
        return deaths, "\n".join(logged.lines)

    def test_a_fault_is_counted_and_logged(self) -> None:
        deaths, said = self.run_with(ZeroDivisionError("a fault"), KeyError("another"))
        self.assertEqual(2.0, deaths)
        self.assertIn("ZeroDivisionError: a fault", said)

    def test_a_database_that_is_away_is_no_fault(self) -> None:
        deaths, said = self.run_with(OperationalError("SELECT", {}, Exception("gone")))
        self.assertEqual(0.0, deaths)
        self.assertIn("gone", said)
        self.assertNotIn("Traceback", said)
