"""Volt's API over HTTP: the client's door, the OpenAPI document, problem documents, bad input."""

from __future__ import annotations

from typing import Any

from tests.userspace.volt_process import DIGEST, VoltCase, run_volt
from volt import errors
from volt.client import NodeReport, NodeState


class Door(VoltCase):
    """Every method of the client against a real Volt."""

    def test_publish_join_heartbeat_leave(self) -> None:
        self.publish()
        self.volt.register("h1", "iscsi://10.0.0.1:3260")
        joined = self.volt.join("image", "h1")
        self.assertEqual(
            (1, NodeState.JOINING, ["origin"]), (joined.slot, joined.state, [p.host for p in joined.parents])
        )
        answer = self.volt.heartbeat("h1", [NodeReport(image="image", revision=joined.revision, fetched_bytes=7)])
        self.assertEqual(([], [], 2.0, 10.0), (answer.assignments, answer.absent, answer.interval_s, answer.lease_s))
        self.assertEqual(1, self.volt.image("image").nodes)
        self.assertEqual(7, self.volt.tree("image").root.children[0].fetched_bytes)
        self.volt.leave("image", "h1", dropped=joined.revision)
        self.assertEqual(NodeState.JOINING, self.volt.join("image", "h1").state)
        self.volt.leave("image", "h1")
        self.assertEqual(NodeState.MOVING, self.volt.join("image", "h1").state)
        self.volt.leave("image", "h1")
        self.volt.remove_image("image")
        self.assertEqual([], self.volt.images())

    def test_a_dead_parent_is_reported(self) -> None:
        self.publish()
        self.join("h1", "h2", "h3")
        self.assertEqual(["h2", "origin"], [p.host for p in self.volt.report_dead("image", "h3", "h1").parents])

    def test_hosts_are_listed_and_removed(self) -> None:
        self.volt.register("h1", "unix:///run/h1")
        self.assertEqual(["h1"], [host.name for host in self.volt.hosts()])
        self.volt.remove_host("h1")
        self.volt.remove_host("h1")
        self.assertEqual([], self.volt.hosts())

    def test_publishing_again_is_known_by_its_status(self) -> None:
        self.volt.register("origin", "unix:///run/origin")
        request = {"name": "image", "size": 512, "digest": DIGEST, "origin": "origin"}
        self.assertEqual([201, 200], [self.http().post("/v1/images", json=request).status_code for _ in range(2)])

    def test_refusals_arrive_as_their_classes(self) -> None:
        self.publish()
        self.join("h1")
        self.volt.register("origin-2", "unix:///run/origin-2")
        refusals: list[tuple[type[errors.Problem], Any]] = [
            (errors.HostUnknown, lambda: self.volt.heartbeat("nobody", [])),
            (errors.HostUnknown, lambda: self.volt.join("image", "nobody")),
            (errors.ImageUnknown, lambda: self.volt.join("nothing", "h1")),
            (errors.ImageUnknown, lambda: self.volt.tree("nothing")),
            (errors.NodeUnknown, lambda: self.volt.report_dead("image", "origin-2", "h1")),
            (errors.HostUnknown, lambda: self.volt.leave("image", "nobody")),
            (errors.ImageConflict, lambda: self.volt.publish("image", 2048, DIGEST, "origin")),
            (errors.HostHasNode, lambda: self.volt.publish("image", 1024, DIGEST, "h1")),
            (errors.OriginNeeded, lambda: self.volt.leave("image", "origin")),
        ]
        for kind, call in refusals:
            self.assertRaises(kind, call)
        error = self.assertRaises(errors.ImageInUse, self.volt.remove_image, "image")
        self.assertEqual(("h1",), error.hosts)


class BadInput(VoltCase):
    """One clear problem each, and nothing changes."""

    def assert_problem(self, slug: str, status: int, method: str, path: str, **request: Any) -> None:
        response = self.http().request(method, path, **request)
        self.assertEqual("application/problem+json", response.headers["Content-Type"], response.text)
        document = response.json()
        self.assertEqual((status, f"urn:volt:problem:{slug}"), (response.status_code, document["type"]), document)
        self.assertEqual(status, document["status"])
        self.assertTrue(document["title"])
        self.assertTrue(document["detail"])

    def test_bad_names_in_paths(self) -> None:
        for name in ("a.b", "..%2e", "-a", "a" * 64, "a" * 300, "%00", "a%0a", "%c3%a9", "a b"):
            self.assert_problem("bad-request", 400, "PUT", f"/v1/hosts/{name}", json={"address": "unix:///run/x"})
        self.assert_problem("no-such-path", 404, "PUT", "/v1/hosts/a/b", json={"address": "unix:///run/x"})
        self.assertEqual([], self.volt.hosts())

    def test_bad_addresses(self) -> None:
        for address in (
            "",
            "/run/x",
            "10.0.0.1:3260",
            "unix:",
            "unix:///run/a b",
            "unix:///run/\n",
            "unix:///" + "a" * 600,
            None,
            7,
        ):
            self.assert_problem("bad-request", 400, "PUT", "/v1/hosts/h1", json={"address": address})
        self.assertEqual([], self.volt.hosts())

    def test_bad_images(self) -> None:
        self.volt.register("origin", "unix:///run/origin")
        good = {"name": "image", "size": 512, "digest": DIGEST, "origin": "origin"}
        bad: dict[str, list[Any]] = {
            "name": ["", "a/b", "a.b", "a" * 64, None],
            "size": [0, -512, 513, 512.5, "512", True, 2**63, None],
            "digest": ["", "sha256:", "a" * 64, "sha256:a/b", "sha256:" + "a" * 129, "S:a", "a" * 17 + ":a"],
            "origin": ["", "../x"],
        }
        for field, values in bad.items():
            for value in values:
                self.assert_problem("bad-request", 400, "POST", "/v1/images", json={**good, field: value})
        self.assertEqual([], self.volt.images())

    def test_bodies_that_are_no_json_or_no_object(self) -> None:
        for body in (b"", b"{", b"[]", b"null", b"7", b"\xff\xfe"):
            headers = {"Content-Type": "application/json"}
            self.assert_problem("bad-request", 400, "POST", "/v1/images", content=body, headers=headers)
        self.assert_problem("bad-request", 400, "POST", "/v1/images", content=b"name=image")

    def test_a_body_that_is_too_large(self) -> None:
        self.assert_problem("too-large", 413, "POST", "/v1/images", content=b"x" * (5 * 1024 * 1024))
        response = self.http().post("/v1/images", content=b"x" * (9 * 1024 * 1024))
        self.assertEqual(413, response.status_code)

    def test_paths_and_methods_that_are_not_there(self) -> None:
        self.assert_problem("no-such-path", 404, "GET", "/")
        self.assert_problem("no-such-path", 404, "GET", "/v1//hosts")
        self.assert_problem("no-such-path", 404, "GET", "/v1/hosts/")
        self.assert_problem("bad-method", 405, "PATCH", "/v1/hosts")


class CommandLine(VoltCase):
    """`volt tree`, `volt hosts`, `volt images` against a real Volt."""

    def setUp(self) -> None:
        """An image and three hosts."""
        super().setUp()
        self.publish()
        self.join("h1", "h2", "h3")

    def run_ok(self, *arguments: str) -> str:
        result = run_volt(*arguments, "--url", self.url)
        self.assertEqual((0, ""), (result.returncode, result.stderr))
        return result.stdout

    def test_tree_is_drawn(self) -> None:
        drawn = self.run_ok("tree", "image").splitlines()
        self.assertIn("image 1K, fanout 2", drawn[0])
        self.assertIn("origin origin joining", drawn[1])
        self.assertIn("h3 joining depth 2 slot 3, 0B", drawn[3])

    def test_hosts_are_listed(self) -> None:
        self.assertIn("h1      alive", self.run_ok("hosts"))
        self.assertIn('"address": "unix:///run/h1"', self.run_ok("hosts", "--json"))

    def test_a_host_is_removed(self) -> None:
        result = run_volt("hosts", "--url", self.url, "remove", "h1")
        self.assertEqual((0, "", ""), (result.returncode, result.stdout, result.stderr))
        self.assertNotIn("h1", [host.name for host in self.volt.hosts()])

    def test_images_are_listed(self) -> None:
        self.assertIn("image  1K    3      origin", self.run_ok("images"))
        self.assertIn('"nodes": 3', self.run_ok("images", "--json"))

    def test_an_image_in_use_is_not_removed_and_one_that_is_not_is(self) -> None:
        refused = run_volt("images", "--url", self.url, "remove", "image")
        self.assertEqual(1, refused.returncode)
        self.assertIn("h1", refused.stderr)
        for host in ("h3", "h2", "h1"):
            self.volt.leave("image", host)
        removed = run_volt("images", "--url", self.url, "remove", "image")
        self.assertEqual((0, "", ""), (removed.returncode, removed.stdout, removed.stderr))
        self.assertEqual([], self.volt.images())

    def test_errors_are_one_line_and_exit_code_one(self) -> None:
        for arguments in (("tree", "nothing"), ("tree", "a/b"), ("hosts", "--token-file", "/no/such/file")):
            result = run_volt(*arguments, "--url", self.url) if arguments[0] == "tree" else run_volt(*arguments)
            self.assertEqual((1, ""), (result.returncode, result.stdout))
            self.assertEqual(1, len(result.stderr.splitlines()), result.stderr)

    def test_a_volt_that_is_not_there_is_one_line(self) -> None:
        result = run_volt("images", "--url", "http://127.0.0.1:1")
        self.assertEqual(1, result.returncode)
        self.assertIn("refused", result.stderr)
        self.assertEqual(1, len(result.stderr.splitlines()))
