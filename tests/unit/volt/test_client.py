"""The client: the errors that it raises, and what it refuses to send."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import httpx
from pydantic import ValidationError
from testtools import TestCase

from volt import client, errors
from volt.client import NodeReport, VoltClient


class Problems(TestCase):
    """What the client raises for a problem document."""

    def problem(self, kind: str, **more: object) -> errors.VoltError:
        document = {"type": kind, "title": "No", "status": 409, "detail": "because of h1", "hosts": ["h1"], **more}
        request = httpx.Request("GET", "http://volt/v1/hosts")
        return client._problem(httpx.Response(409, json=document, request=request))

    def test_a_refusal_keeps_volts_words(self) -> None:
        for kind, problem in errors.KINDS.items():
            error = self.problem(kind, unknown="x")
            assert isinstance(error, problem)
            self.assertEqual(("because of h1", ("h1",)), (str(error), error.hosts))

    def test_a_refusal_of_a_later_version_keeps_volts_words(self) -> None:
        error = self.problem("urn:volt:problem:new")
        assert isinstance(error, errors.Problem)
        self.assertEqual((errors.Problem, 409, "because of h1"), (type(error), error.status, str(error)))

    def test_a_problem_of_another_server_is_none_of_volts(self) -> None:
        error = self.problem("about:blank")
        self.assertEqual((errors.VoltError, "GET http://volt/v1/hosts: status 409"), (type(error), str(error)))


class Sending(TestCase):
    """Requests that never leave."""

    def setUp(self) -> None:
        """A client of nothing."""
        super().setUp()
        self.volt = self.enterContext(VoltClient("http://127.0.0.1:1"))

    def test_a_name_that_would_change_the_path_is_refused(self) -> None:
        for name in ("a/b", "..", "a?b", "", "a\n"):
            self.assertRaises(errors.BadRequest, self.volt.image, name)

    def test_a_bad_request_is_refused(self) -> None:
        self.assertRaises(errors.BadRequest, self.volt.register, "h1", "/run/x")
        self.assertRaises(errors.BadRequest, self.volt.publish, "image", 100, "sha256:" + "a" * 64, "h1")

    def test_nobody_listening_is_unreachable(self) -> None:
        self.assertRaises(errors.VoltUnreachable, self.volt.hosts)
        self.assertRaises(errors.VoltUnreachable, self.volt.heartbeat, "h1", [NodeReport(image="image", revision=1)])

    def test_a_malformed_url_is_refused_at_once(self) -> None:
        for url in ("http://volt:port", "gopher://x", "nonsense", "127.0.0.1:8700", "http:///x"):
            error = self.assertRaises(errors.VoltError, VoltClient, url)
            self.assertIn(f"{url!r} is not a URL of Volt", str(error))

    def test_importing_the_client_imports_neither_the_server_nor_the_command_line_of_httpx(self) -> None:
        heavy = "{'flask', 'sqlalchemy', 'rich', 'pygments', 'alembic'}"
        code = f"import sys, volt.client; sys.exit(bool({heavy} & set(sys.modules)))"
        self.assertEqual(0, subprocess.run([sys.executable, "-c", code], check=False).returncode)

    def test_an_answer_that_is_wrong_is_not_repeated(self) -> None:
        wrong = '{"assignments": [{"children": [{"host": 1, "secret": "whispered"}, {"secret": "whispered"}]}]}'
        error = self.assertRaises(ValidationError, client.HeartbeatAnswer.model_validate_json, wrong)
        self.assertNotIn("whispered", str(error))

    def test_a_later_version_may_say_more(self) -> None:
        new: dict[str, Any] = {"colour": "red", "more": {"of": ["it"]}}
        end = {"host": "h2", "secret": "x", **new}
        place = {
            "image": "image", "size": 512, "digest": "", "slot": 1, "revision": 7, "state": "floating",
            "parents": [{"address": "unix:///run/h2", **end}], "children": [end], **new,
        }  # fmt: skip
        answer = {"interval_s": 2.0, "lease_s": 10.0, "assignments": [place], "absent": [], **new}
        heard = client.HeartbeatAnswer.model_validate_json(json.dumps(answer))
        self.assertEqual((7, "h2"), (heard.assignments[0].revision, heard.assignments[0].parents[0].host))
        self.assertEqual(client.NodeState.UNKNOWN, heard.assignments[0].state)
        host = {"name": "h1", "address": "", "state": "asleep", "last_seen": "2026-01-01T00:00:00Z", **new}
        self.assertEqual(client.HostState.UNKNOWN, client.Host.model_validate_json(json.dumps(host)).state)
