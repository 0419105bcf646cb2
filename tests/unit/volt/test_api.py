"""Volt's API in this process: bad input, faults inside, the token, and secrets."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import text
from testtools import TestCase

from tests.unit.logs import Logged
from tests.unit.volt.databases import new_database
from volt.api import MAX_BODY, create_app
from volt.coordinator import Coordinator
from volt.store import Store

IMAGE = {"name": "image", "size": 1024, "digest": "sha256:" + "a" * 64, "origin": "origin"}


class ApiCase(TestCase):
    """An application on a temporary database, and one host and one image in it."""

    token: str | None = None

    def setUp(self) -> None:
        """Make them."""
        super().setUp()
        self.logged = Logged(self, "")
        self.store = Store(new_database(self))
        self.addCleanup(self.store.close)
        self.volt = Coordinator(self.store)
        self.client = create_app(self.volt, self.token).test_client()
        self.volt.register("origin", "unix:///run/origin")
        self.volt.publish("image", 1024, "sha256:" + "a" * 64, "origin")

    def run_sql(self, statement: str) -> None:
        with self.store.write() as session:
            session.execute(text(statement))


class Faults(ApiCase):
    """The answer says what kind of fault; the log says more."""

    def test_a_fault_is_an_internal_error_without_details(self) -> None:
        def fail() -> None:
            raise ZeroDivisionError("a secret of the inside")

        self.patch(self.volt, "hosts", fail)
        response = self.client.get("/v1/hosts")
        self.assertEqual((500, "application/problem+json"), (response.status_code, response.content_type))
        self.assertNotIn("secret", response.text)
        self.assertIn("a secret of the inside", "\n".join(self.logged.lines))

    def test_a_database_that_fails_is_said_to_be_down(self) -> None:
        self.run_sql("ALTER TABLE images RENAME TO gone")
        response = self.client.get("/v1/images")
        self.assertEqual((503, "urn:volt:problem:store-down"), (response.status_code, response.get_json()["type"]))

    def test_metrics_tell_of_a_thread_that_died(self) -> None:
        self.assertIn('volt_thread_deaths_total{thread="leases"} 0.0', self.client.get("/metrics").text)


class Token(ApiCase):
    """With a token."""

    token = "open-sesame"

    def test_every_call_but_that_for_health_and_the_document_needs_it(self) -> None:
        for path, status in (("/metrics", 401), ("/v1/x", 401), ("/v1/hosts", 401), ("/openapi.json", 200)):
            self.assertEqual(status, self.client.get(path).status_code, path)
        self.assertEqual({"status": "ok"}, self.client.get("/healthz").get_json())

    def test_who_lacks_it_is_told_how_to_send_it(self) -> None:
        for sent, detail in (
            (None, "send the token: Authorization: Bearer …"),
            ("Basic b3Blbi1zZXNhbWU=", "the token is not the one of this Volt"),
            ("Bearer open-sesamE", "the token is not the one of this Volt"),
        ):
            response = self.client.get("/v1/hosts", headers={"Authorization": sent} if sent else {})
            self.assertEqual((401, "Bearer"), (response.status_code, response.headers["WWW-Authenticate"]))
            self.assertEqual(detail, response.get_json()["detail"])
        response = self.client.get("/v1/hosts", headers={"Authorization": "Bearer open-sesame"})
        self.assertEqual(200, response.status_code)


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

    def test_names_in_paths(self) -> None:
        for name in ("..%2e", "-a", "a" * 64, "a" * 300, "%00", "a%0a", "%c3%a9", "a b"):
            self.refused("PUT", f"/v1/hosts/{name}", json={"address": "unix:///run/x"})

    def test_addresses(self) -> None:
        for address in ("", "/run/x", "10.0.0.1:1", "unix:", "unix:///a b", "unix:///\n", "unix:" + "a" * 600, None, 7):
            self.assertIn("address", self.refused("PUT", "/v1/hosts/h1", json={"address": address}))

    def test_images(self) -> None:
        bad: dict[str, list[Any]] = {
            "name": ["", "a/b", "a.b", "a" * 64, None],
            "size": [0, -512, 513, 512.5, "512", True, 2**63, None],
            "digest": ["", "sha256:", "a" * 64, "sha256:a/b", "sha256:" + "a" * 129, "S:a", "a" * 17 + ":a"],
            "origin": ["", "../x"],
        }
        for field, values in bad.items():
            for value in values:
                self.assertIn(field, self.refused("POST", "/v1/images", json={**IMAGE, field: value}))

    def test_bodies(self) -> None:
        for path, body in (
            ("/v1/images", {}),
            ("/v1/images/image/nodes", {"host": 7}),
            ("/v1/images/image/reports", {"reporter": "origin"}),
            ("/v1/hosts/origin/heartbeat", {"nodes": [{"image": "image"}]}),
            ("/v1/hosts/origin/heartbeat", {"nodes": [{"image": "image", "revision": 2**63}]}),
            ("/v1/hosts/origin/heartbeat", {"nodes": {}}),
        ):
            self.refused("POST", path, json=body)

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
            ("GET", "/v1//hosts", 404, "GET /v1//hosts: there is no such path in Volt's API"),
            ("GET", "/v1/hosts/", 404, "GET /v1/hosts/: there is no such path in Volt's API"),
            ("PATCH", "/v1/hosts", 405, "PATCH /v1/hosts: this path does not take this method"),
        ):
            response = self.client.open(path, method=method)
            self.assertEqual((status, detail), (response.status_code, response.get_json()["detail"]))
        self.assertIn("GET", response.headers["Allow"])
        for kind in ("application/json", "text/plain", None):
            response = self.client.post("/v1/images", data=b" " * (MAX_BODY + 1), content_type=kind)
            self.assertEqual(413, response.status_code)
            self.assertEqual(f"POST /v1/images: a body may have {MAX_BODY} bytes", response.get_json()["detail"])


class Calls(ApiCase):
    """What callers rely on besides the contract (test_contract.py)."""

    def test_publishing_again_is_known_by_its_status(self) -> None:
        new = {**IMAGE, "name": "new"}
        self.assertEqual([201, 200], [self.client.post("/v1/images", json=new).status_code for _ in range(2)])

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


class Secrets(ApiCase):
    """Only who is at an edge learns its secret, and nobody learns the key."""

    def setUp(self) -> None:
        """Hosts h1 to h4 join the image."""
        super().setUp()
        self.answers: list[str] = []
        self.secrets: set[str] = {self.store.edge_key.hex()}
        for host in ("h1", "h2", "h3", "h4"):
            self.call("PUT", f"/v1/hosts/{host}", address=f"unix:///run/{host}")
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
        self.assertIn("host h1 registered", said)
        self.assertIn("in use by", said)
        self.assertEqual([], [secret for secret in self.secrets if secret in said])

    def test_a_database_that_fails_does_not_bring_one_into_the_log(self) -> None:
        self.run_sql("ALTER TABLE departures RENAME TO gone")
        self.call("POST", "/v1/images/image/nodes", host="h1")
        said = "\n".join([*self.answers, *self.logged.lines])
        self.assertIn("departures", said)
        self.assertEqual([], [secret for secret in self.secrets if secret in said])
