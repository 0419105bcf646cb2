"""Faults inside Volt, as its callers see them."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

from sqlalchemy import text
from testtools import TestCase

from volt.api import create_app
from volt.coordinator import Coordinator
from volt.models import Host
from volt.store import Store


class BrokenCoordinator(Coordinator):
    """Has a fault."""

    def hosts(self) -> list[Host]:
        """Fail."""
        raise ZeroDivisionError("a secret of the inside")


class Faults(TestCase):
    """The answer says what kind of fault; the log says more."""

    def setUp(self) -> None:
        """An application on a temporary database."""
        super().setUp()
        folder = tempfile.mkdtemp(dir="/tmp")
        self.addCleanup(shutil.rmtree, folder)
        self.store = Store(f"sqlite:///{Path(folder) / 'volt.db'}")
        self.addCleanup(self.store.close)
        self.client = create_app(BrokenCoordinator(self.store)).test_client()
        logging.getLogger("volt.api").setLevel(logging.CRITICAL)
        self.addCleanup(logging.getLogger("volt.api").setLevel, logging.NOTSET)

    def test_a_fault_is_an_internal_error_without_details(self) -> None:
        response = self.client.get("/v1/hosts")
        self.assertEqual((500, "application/problem+json"), (response.status_code, response.content_type))
        self.assertNotIn("secret", response.text)

    def test_a_database_that_fails_is_said_to_be_down(self) -> None:
        with self.store.write() as session:
            session.execute(text("DROP TABLE departures"))
            session.execute(text("DROP TABLE nodes"))
            session.execute(text("DROP TABLE images"))
        response = self.client.get("/v1/images")
        self.assertEqual((503, "urn:volt:problem:store-down"), (response.status_code, response.get_json()["type"]))
