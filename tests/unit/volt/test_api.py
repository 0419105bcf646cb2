"""Faults inside Volt, as its callers see them, and what is not for all of them."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from sqlalchemy import text
from testtools import TestCase

from tests.unit.logs import Logged
from tests.unit.volt.databases import new_database
from volt.api import MAX_BODY, create_app
from volt.coordinator import Coordinator
from volt.models import Host
from volt.store import Store

IMAGE = {"name": "image", "size": 1024, "digest": "sha256:" + "a" * 64, "origin": "origin"}


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


class ApiCase(TestCase):
    """An application on a temporary database, and one host and one image in it."""

    def setUp(self) -> None:
        """Make them."""
        super().setUp()
        self.store = Store(new_database(self))
        self.addCleanup(self.store.close)
        self.client = create_app(Coordinator(self.store)).test_client()
        self.client.put("/v1/hosts/origin", json={"address": "unix:///run/origin"})
        self.client.post("/v1/images", json=IMAGE)


class Input(ApiCase):
    """Invalid input is 400, with a whole problem document, wherever it stands."""

    def refused(self, method: str, path: str, **request: Any) -> str:
        """The detail of the refusal."""
        response = self.client.open(path, method=method, **request)
        document = response.get_json()
        self.assertEqual((400, "application/problem+json"), (response.status_code, response.content_type), path)
        self.assertEqual({"type", "title", "status", "detail", "hosts"}, set(document))
        self.assertEqual(("urn:volt:problem:bad-request", 400), (document["type"], document["status"]))
        self.assertTrue(document["title"])
        detail: str = document["detail"]
        self.assertTrue(detail)
        return detail

    def test_paths(self) -> None:
        for method, path, body in (
            ("PUT", "/v1/hosts/a.b", {"address": "unix:///run/x"}),
            ("DELETE", "/v1/hosts/a.b", None),
            ("POST", "/v1/hosts/a.b/heartbeat", {"nodes": []}),
            ("GET", "/v1/images/a.b", None),
            ("DELETE", "/v1/images/a.b", None),
            ("GET", "/v1/images/a.b/tree", None),
            ("POST", "/v1/images/a.b/nodes", {"host": "origin"}),
            ("DELETE", "/v1/images/image/nodes/a.b", None),
            ("POST", "/v1/images/a.b/reports", {"reporter": "a", "dead": "b"}),
        ):
            self.assertIn("String should match pattern", self.refused(method, path, json=body))

    def test_the_query(self) -> None:
        for dropped in ("x", "", "1.5", "-2", str(2**63)):
            self.assertIn("dropped", self.refused("DELETE", f"/v1/images/image/nodes/origin?dropped={dropped}"))
        self.assertIn("when_unused", self.refused("DELETE", "/v1/images/image?when_unused=perhaps"))

    def test_bodies(self) -> None:
        for path, body in (
            ("/v1/images", {**IMAGE, "size": "1024"}),
            ("/v1/images", {**IMAGE, "size": None}),
            ("/v1/images", {}),
            ("/v1/images/image/nodes", {"host": 7}),
            ("/v1/images/image/reports", {"reporter": "origin"}),
            ("/v1/hosts/origin/heartbeat", {"nodes": [{"image": "image"}]}),
            ("/v1/hosts/origin/heartbeat", {"nodes": [{"image": "image", "revision": 2**63}]}),
            ("/v1/hosts/origin/heartbeat", {"nodes": {}}),
        ):
            self.refused("POST", path, json=body)
        self.assertIn("address", self.refused("PUT", "/v1/hosts/h1", json={"address": "nowhere"}))

    def test_bodies_that_are_no_json_object(self) -> None:
        for data in (b"", b"{", b"[]", b"null", b"7", b"\xff\xfe", b"name=image", b"[" * 100_000):
            detail = self.refused("POST", "/v1/images", data=data, content_type="application/json")
            self.assertIn("JSON", detail, repr(data[:10]))

    def test_a_body_that_says_it_is_something_else(self) -> None:
        for kind in ("text/plain", "application/x-www-form-urlencoded", None):
            detail = self.refused("POST", "/v1/images", data=json.dumps(IMAGE), content_type=kind)
            self.assertEqual("the body must be a JSON object, sent as application/json", detail)

    def test_what_is_not_there_is_said_in_our_words(self) -> None:
        for method, path, status, detail in (
            ("GET", "/v2/hosts", 404, "GET /v2/hosts: there is no such path in Volt's API"),
            ("PATCH", "/v1/hosts", 405, "PATCH /v1/hosts: this path does not take this method"),
        ):
            response = self.client.open(path, method=method)
            self.assertEqual((status, detail), (response.status_code, response.get_json()["detail"]))
        for kind in ("application/json", "text/plain", None):
            response = self.client.post("/v1/images", data=b" " * (MAX_BODY + 1), content_type=kind)
            self.assertEqual(413, response.status_code)
            self.assertEqual(f"POST /v1/images: a body may have {MAX_BODY} bytes", response.get_json()["detail"])


class Versions(ApiCase):
    """A client that is one minor version ahead: what it says in excess is ignored."""

    def test_fields_that_are_not_known_are_ignored(self) -> None:
        new = {"colour": "red", "more": {"of": ["it"]}}
        for method, path, body in (
            ("PUT", "/v1/hosts/h1", {"address": "unix:///run/h1"}),
            ("POST", "/v1/images", IMAGE),
            ("POST", "/v1/images/image/nodes", {"host": "h1"}),
            ("POST", "/v1/images/image/reports", {"reporter": "h1", "dead": "origin"}),
            ("POST", "/v1/hosts/h1/heartbeat", {"nodes": [{"image": "image", "revision": 1, **new}]}),
            ("DELETE", "/v1/images/image/nodes/h1?dropped=3&colour=red", {}),
        ):
            response = self.client.open(path, method=method, json={**body, **new})
            self.assertIn(response.status_code, (200, 204), response.text)


class Threads(ApiCase):
    """What goes on in the background."""

    def test_metrics_tell_of_a_thread_that_died(self) -> None:
        self.assertIn('volt_thread_deaths_total{thread="leases"} 0.0', self.client.get("/metrics").text)


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
