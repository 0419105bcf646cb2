"""Faults inside Volt, as its callers see them, and what is not for all of them."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from sqlalchemy import text
from testtools import TestCase

from tests.unit.logs import Logged
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


class Secrets(TestCase):
    """Only who is at an edge learns its secret, and nobody learns the key."""

    def setUp(self) -> None:
        """An image with hosts h1 to h4, and the log of all that follows."""
        super().setUp()
        folder = tempfile.mkdtemp(dir="/tmp")
        self.addCleanup(shutil.rmtree, folder)
        self.logged = Logged(self, "")
        self.store = Store(f"sqlite:///{Path(folder) / 'volt.db'}")
        self.addCleanup(self.store.close)
        self.client = create_app(Coordinator(self.store)).test_client()
        self.answers: list[str] = []
        self.secrets: set[str] = {self.store.edge_key.hex()}
        for host in ("origin", "h1", "h2", "h3", "h4"):
            self.call("PUT", f"/v1/hosts/{host}", address=f"unix:///run/{host}")
        self.call("POST", "/v1/images", name="image", size=512, digest="sha256:" + "a" * 64, origin="origin")
        for host in ("h1", "h2", "h3", "h4"):
            self.assign("POST", "/v1/images/image/nodes", host=host)

    def call(self, method: str, path: str, **body: object) -> Any:
        response = self.client.open(path, method=method, json=body or None)
        self.answers.append(response.text)
        return response.get_json(silent=True)

    def assign(self, method: str, path: str, **body: object) -> None:
        """A call that is answered with assignments."""
        answer = self.call(method, path, **body)
        self.answers.pop()
        for assignment in answer.get("assignments", [answer]):
            self.secrets |= {end["secret"] for end in assignment["parents"] + assignment["children"]}

    def test_no_other_answer_and_no_line_of_the_log_has_one(self) -> None:
        self.assign("POST", "/v1/hosts/h1/heartbeat", nodes=[])
        self.assign("POST", "/v1/images/image/reports", reporter="h3", dead="h1")
        for path in ("/v1/hosts", "/v1/images", "/v1/images/image", "/v1/images/image/tree", "/metrics", "/healthz"):
            self.call("GET", path)
        self.call("POST", "/v1/images/image/reports", reporter="nobody", dead="h1")
        self.call("DELETE", "/v1/images/image")
        self.call("DELETE", "/v1/hosts/h4")
        said = "\n".join([*self.answers, *self.logged.lines])
        self.assertTrue(len(self.secrets) > 5, self.secrets)
        self.assertIn("Running upgrade", said)
        self.assertIn("host h1 registered", said)
        self.assertIn("in use by", said)
        self.assertEqual([], [secret for secret in self.secrets if secret in said])

    def test_a_database_that_fails_does_not_bring_one_into_the_log(self) -> None:
        with self.store.write() as session:
            session.execute(text("ALTER TABLE departures RENAME TO gone"))
        self.call("POST", "/v1/images/image/nodes", host="h1")
        said = "\n".join([*self.answers, *self.logged.lines])
        self.assertIn("departures", said)
        self.assertEqual([], [secret for secret in self.secrets if secret in said])
