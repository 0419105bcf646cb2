"""The local API and its client, over a real unix socket."""

from __future__ import annotations

import errno
import gc
import json
import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock
from uuid import UUID

import flask
import httpx
import pytest
from flask.testing import FlaskClient
from testtools import TestCase
from testtools.matchers import Contains, MatchesRegex
from werkzeug.test import TestResponse

from drivers import errors as driver_errors
from tests.doubles.drivers import POOL
from tests.doubles.servers import serve_agent
from tests.doubles.volt import SECRET
from tests.patience import wait_until
from tests.unit.logs import Logged
from tests.unit.virtman.agents import SOON, SiteCase
from tests.unit.virtman.devices import some_device
from tests.unit.virtman.scene import folder_for
from virtman import copies, migration, models
from virtman.agent import Agent
from virtman.api import HUNG_UP, MAX_BODY, MOST_LONG, PEER, PROBLEM, create_app
from virtman.client import AgentClient
from virtman.convert import Progress
from virtman.errors import (
    BY_KIND,
    AgentFailed,
    AgentUnreachable,
    BadDevice,
    BadRequest,
    CallerGone,
    DiskBusy,
    DriverTrouble,
    HostTrouble,
    NoRoom,
    NotSupported,
    NoVolumes,
    VirtmanError,
)
from virtman.fdpassing import Passed
from virtman.peer import Peer
from virtman.sizes import LARGEST_DISK

BAD_NAMES = ["a.b", "..", "-a", "a" * 64, "a" * 300, "a b", "%00", "é", "a%0a"]
BAD_PATHS = ["", "a", "./a", "/", "//a", "/a\0", "/a\nb", "/\n", "/a\r", "/a\x1b[2J", "/\ud800", "/" + "a" * 4095]

BAD_SIZES: list[object] = [0, -512, 1, 513, 0.5, "big", LARGEST_DISK + 512, 1 << 70, [], True]


class ApiTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.socket = folder_for(self) / "agent.sock"

    def serve(self, agent: Agent) -> AgentClient:
        serve_agent(self, create_app(agent), self.socket)
        client = AgentClient(self.socket, timeout=120)
        transport = httpx.HTTPTransport(uds=str(self.socket))
        self.http = self.enterContext(httpx.Client(transport=transport, base_url="http://agent", trust_env=False))
        return client


class SiteTest(SiteCase, ApiTest):
    """A whole agent serves."""

    def setUp(self) -> None:
        super().setUp()
        self.client = self.serve(self.agent)


class FailingAgent(Agent):
    """Fails in every call with the error that it is given."""

    def __init__(self, error: Exception, folder: Path) -> None:
        self.error = error
        self.config = mock.Mock(socket=folder / "agent.sock")
        self.overview = self.publishing = self  # type: ignore[assignment]

    def status(self) -> models.Status:
        raise self.error

    def publish(
        self, name: str, file: Path | Passed, progress: Progress, parent: str | None = None
    ) -> models.Published:  # fmt: skip
        progress("copy", 0, 1)
        raise self.error


class ErrorsTest(ApiTest):
    def setUp(self) -> None:
        super().setUp()
        self.agent = FailingAgent(VirtmanError(), self.socket.parent)
        self.client = self.serve(self.agent)
        self.file = self.socket.with_name("x")
        self.file.touch()

    def raised(self, error: Exception, call: Callable[[], object]) -> Exception:
        """What the caller of the client sees of the agent's error."""
        self.agent.error = error
        try:
            call()
        except VirtmanError as seen:
            return seen
        raise AssertionError("nothing was raised")

    def publish(self) -> object:
        return self.client.publish("x", self.file)

    def test_every_error_is_a_problem_document_and_comes_out_as_it_went_in(self) -> None:
        for cls in BY_KIND.values():
            for call in (self.client.status, self.publish):
                seen = self.raised(cls("the reason, größer"), call)
                self.assertEqual((cls, "the reason, größer"), (type(seen), str(seen)))
            short, long = self.http.get("/v1/status"), self.http.post("/v1/images", json={"name": "x", "file": "/x"})
            self.assertEqual((cls.status, PROBLEM), (short.status_code, short.headers["content-type"]))
            self.assertEqual(200, long.status_code)
            for document in (short.json(), json.loads(long.text.splitlines()[-1])["problem"]):
                self.assertEqual(f"urn:virtman:problem:{cls.kind}", document["type"])
                self.assertEqual((cls.status, "the reason, größer"), (document["status"], document["detail"]))
                self.assertIn("title", document)

    def test_errors_of_drivers_and_of_the_hosts_files_come_out_as_the_agents(self) -> None:
        volume, full = driver_errors.BadVolume(Path("/dev/sdx"), "it is mounted"), "/var/lib/virtman/records"
        raised: tuple[tuple[Exception, type[VirtmanError], int, str], ...] = (
            (driver_errors.NoSpace(Path("/disk"), 1, 2), NoRoom, 507, "/disk"),
            (OSError(errno.ENOSPC, "it is full", full), NoRoom, 507, full),
            (OSError(errno.EDQUOT, "it is full", full), NoRoom, 507, full),
            (OSError(errno.EIO, "broken\ndisk", "/x"), HostTrouble, 500, "[Errno 5] broken disk: '/x'"),
            (volume, BadRequest, 409, str(volume)),
            (driver_errors.DiskInUse("vm"), DiskBusy, 409, "vm"),
            (driver_errors.DeviceInUse(Path("/dev/sdx")), DiskBusy, 409, "--force"),
            (driver_errors.DeviceRefused("/dev/sdx is too small"), BadDevice, 409, "too small"),
            (driver_errors.NotPossible("its disks have no snapshots"), NotSupported, 409, "no snapshots"),
            (driver_errors.VolumeInUse(Path("/dev/sdx"), ["sdb"]), DiskBusy, 409, "sdb"),
            (driver_errors.ToolMissing("qemu-img"), DriverTrouble, 500, "qemu-img"),
            (ZeroDivisionError("division"), VirtmanError, 500, "unexpected ZeroDivisionError: division"),
        )
        for error, ours, status, said in raised:
            for call in (self.client.status, self.publish):
                seen = self.raised(error, call)
                self.assertEqual((ours, status), (type(seen), ours.status), repr(error))
                self.assertThat(str(seen), Contains(said))


class StalledAgent(Agent):
    """Tells of some progress of a long call, and goes on when it may."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.began = threading.Event()
        self.may_go_on = threading.Event()
        self.ended: queue.Queue[Exception | None] = queue.Queue()
        self.config = mock.Mock(socket=folder / "agent.sock")
        self.overview = self.publishing = self  # type: ignore[assignment]
        self.vms = mock.Mock()

    def status(self) -> models.Status:
        raise NoVolumes("it answers")

    def work(self, progress: Progress) -> None:
        self.began.set()
        try:
            progress("copy", 0, 1)
            self.may_go_on.wait()
            progress("copy", 1, 1)
        except CallerGone as error:
            self.ended.put(error)
            raise
        self.ended.put(None)

    def export_vm(
        self, _vms: object, _vm: str, file: Path | Passed, image_format: str, progress: Progress
    ) -> models.Exported:
        """In the place of ``copies.export_vm``."""
        self.work(progress)
        return models.Exported(file=str(file), format=image_format, size=1)

    def publish(
        self, name: str, file: Path | Passed, progress: Progress, parent: str | None = None
    ) -> models.Published:  # fmt: skip
        self.work(progress)
        return models.Published(name=name, size=512, digest="sha256:0")

    def publish_vm(self, name: str, vm: str, progress: Progress) -> models.Published:
        return self.publish(name, Path(vm), progress)

    def leave(
        self, _vms: object, _vm: str, _uri: str, _domain: str, _snapshot: str, tell: Callable[[int, int], None]
    ) -> int:
        """In the place of ``migration.leave``."""
        self.work(lambda _step, done, total: tell(done, total))
        return 0


class LongCallsTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.agent = StalledAgent(folder_for(self))
        self.patch(migration, "leave", self.agent.leave)
        self.patch(copies, "export_vm", self.agent.export_vm)
        self.app = create_app(self.agent)
        self.addCleanup(self.agent.may_go_on.set)
        self.hung_up = threading.Event()
        self.caller = {PEER: Peer(pid=1, uid=0, gid=0), HUNG_UP: self.hung_up.is_set}

    def http(self) -> FlaskClient:
        client = self.app.test_client()
        client.environ_base.update(self.caller)  # type: ignore[arg-type]
        return client

    def export(self) -> TestResponse:
        """The beginning of an answer that is going on."""
        return self.http().post("/v1/vms/vm/export", json={"file": "/x", "format": "raw"})

    def receive(self) -> TestResponse:
        return self.http().post("/v1/vms/vm/receive", json={"image": "debian"}, buffered=True)

    def fill(self) -> list[TestResponse]:
        """All calls that there may be."""
        answers = [self.export() for _ in range(MOST_LONG)]
        self.assertEqual({200}, {answer.status_code for answer in answers})
        return answers

    def check_full(self) -> None:
        for answer in (self.export(), self.receive()):
            self.assertEqual((503, PROBLEM), (answer.status_code, answer.content_type))
            problem = answer.get_json()
            self.assertEqual("urn:virtman:problem:too-many-calls", problem["type"])
            self.assertThat(problem["detail"], Contains(f"{MOST_LONG} calls"))
            self.assertThat(problem["detail"], Contains("ask again"))

    def test_one_too_many_is_refused_until_one_has_ended_and_all_else_goes_on(self) -> None:
        answers = self.fill()
        self.check_full()
        answer = self.http().get("/v1/status")
        self.assertEqual("it answers", answer.get_json()["detail"])
        self.agent.may_go_on.set()
        self.assertThat(answers[0].get_data(as_text=True), Contains('"answer":{"file"'))
        answers[0].close()
        self.agent.may_go_on.clear()
        self.assertEqual(200, self.export().status_code)
        self.check_full()

    def left(self, path: str, body: dict[str, Any]) -> Exception | None:
        """What ended a call whose caller hung up."""
        for event in (self.agent.began, self.agent.may_go_on, self.hung_up):
            event.clear()
        self.http().post(path, json=body)
        self.assertTrue(self.agent.began.wait(SOON))
        self.hung_up.set()
        self.agent.may_go_on.set()
        return self.agent.ended.get(timeout=SOON)

    def test_what_a_caller_hangs_up_on_ends_unless_he_said_otherwise(self) -> None:
        move = {"to": "qemu+ssh://b/system", "domain": "<domain/>", "snapshot": "virtman-migration-0"}
        self.assertIsInstance(self.left("/v1/vms/vm/migration", move), CallerGone)
        self.assertIsInstance(self.left("/v1/vms/vm/export", {"file": "/x", "format": "raw"}), CallerGone)
        for path, body in (("/v1/images", {"name": "x", "file": "/x"}), ("/v1/vms/vm/publish", {"image": "x"})):
            self.assertIsInstance(self.left(path, body), CallerGone)
            self.assertIsNone(self.left(path, {**body, "detach": True}))

    def test_the_server_notices_a_caller_who_hangs_up_while_nothing_is_told(self) -> None:
        asked: list[Callable[[], bool]] = []
        self.app.before_request(lambda: asked.append(flask.request.environ[HUNG_UP]))
        path = self.agent.config.socket
        serve_agent(self, self.app, path)
        self.addCleanup(self.agent.may_go_on.set)  # before the server ends
        with (
            httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=SOON) as http,
            http.stream("POST", "http://agent/v1/images", json={"name": "x", "file": "/x"}) as answer,
        ):
            next(answer.iter_lines())
            self.assertFalse(asked[0]())
        wait_until(asked[0])
        self.agent.may_go_on.set()
        self.assertIsInstance(self.agent.ended.get(timeout=SOON), CallerGone)


class BadRequestsTest(SiteTest):
    def problem(self, status: int, method: str, path: str, **request: Any) -> dict[str, Any]:
        """The problem that a request is answered with. Nothing has changed on the host."""
        answer = self.http.request(method, path, **request)
        self.assertEqual((status, PROBLEM), (answer.status_code, answer.headers["content-type"]), answer.text)
        self.assertEqual({}, self.site.host.leftovers())
        document: dict[str, Any] = answer.json()
        self.assertEqual({"type", "title", "status", "detail"}, set(document))
        self.assertEqual(1, len(document["detail"].splitlines()))
        return document

    def test_what_cannot_be_asked_for_is_refused(self) -> None:
        vm, boot = {"image": "debian"}, {"image": "debian", "memory": 64}
        wrong: list[tuple[str, str, dict[str, Any], str, list[Any]]] = [
            ("PUT", "/v1/vms/vm", {}, "image", [*BAD_NAMES, "a/b", None, 1, ["debian"]]),
            ("PUT", "/v1/vms/vm", vm, "size", BAD_SIZES),
            ("PUT", "/v1/vms/vm/size", {}, "size", [*BAD_SIZES, None]),
            ("POST", "/v1/vms/vm/boot", boot, "memory", [31, 1 << 25]),
            ("POST", "/v1/vms/vm/boot", boot, "cpus", [0, 513]),
            ("POST", "/v1/vms/vm/boot", boot, "network", ["wifi", "bridge:", "bridge:a/b", "user\n"]),
            ("POST", "/v1/vms/vm/boot", boot, "ssh_keys", ["key", ["\ud800"]]),
            ("POST", "/v1/vms/vm/boot", boot, "user_data", [1, "\ud800"]),
            ("POST", "/v1/vms/vm/clones", {}, "names", [[], [""], ["a/b"], "new", None, ["new"] * 10_001]),
            ("POST", "/v1/vms/vm/export", {"file": "/x"}, "format", ["vmdk"]),
            ("POST", "/v1/vms/vm/export", {}, "file", BAD_PATHS),
            ("POST", "/v1/images/debian/export", {}, "file", BAD_PATHS),
            ("POST", "/v1/images", {"file": "/x"}, "name", BAD_NAMES),
            ("POST", "/v1/images", {"name": "mine"}, "file", [*BAD_PATHS, None, 1]),
            ("POST", "/v1/vms/vm/publish", {}, "image", BAD_NAMES),
            ("POST", "/v1/cache/volumes", {}, "path", [*BAD_PATHS, None, 1, ["/a"]]),
        ]
        for method, path, body, field, values in wrong:
            for value in values:
                # In ASCII, as the client could not send half a surrogate.
                content, headers = json.dumps({**body, field: value}), {"content-type": "application/json"}
                document = self.problem(400, method, path, content=content, headers=headers)
                self.assertThat(document["detail"], Contains(field))

    def test_bad_names_in_paths_and_bad_queries_are_refused(self) -> None:
        for name in BAD_NAMES:
            if name != "..":  # clients take it out of the path
                for method, path in (("GET", "vms/{}"), ("DELETE", "vms/{}"), ("GET", "images/{}/tree")):
                    self.problem(400, method, f"/v1/{path.format(name)}")
                self.problem(400, "PUT", f"/v1/vms/vm/snapshots/{name}")
        for query in ("", "?path=", "?path=a", "?path=/a%00", "?path=/a%0Ab", "?file=/a"):
            self.problem(400, "DELETE", f"/v1/cache/volumes{query}")
        self.problem(404, "GET", "/v1/vms/a%2Fb")

    def test_a_body_that_is_no_object_in_json_is_refused(self) -> None:
        headers = {"content-type": "application/json"}
        for content in (b"{}", b"[]", b'"x"', b"null", b"1", b"", b"{", b"\xff", b"image=debian", b"[" * 100_000):
            self.problem(400, "PUT", "/v1/vms/vm", content=content, headers=headers)
        self.problem(400, "PUT", "/v1/vms/vm", content=b'{"image": "debian"}', headers={"content-type": "text/plain"})

    def test_a_path_or_method_that_is_not_there(self) -> None:
        for path in ("/v1", "/v1/vmss", "/v2/status", "/v1/vms/vm/explode"):
            self.assertEqual("urn:virtman:problem:agent-failed", self.problem(404, "GET", path)["type"])
        for method, path in (("POST", "/v1/status"), ("DELETE", "/v1/vms"), ("DELETE", "/v1/gc")):
            self.assertEqual("urn:virtman:problem:agent-failed", self.problem(405, method, path)["type"])

    def test_a_body_that_is_too_large(self) -> None:
        body = b'{"image": "debian", "more": "' + b"x" * MAX_BODY + b'"}'
        headers = {"content-type": "application/json"}
        document = self.problem(413, "PUT", "/v1/vms/vm", content=body, headers=headers)
        self.assertEqual("urn:virtman:problem:agent-failed", document["type"])

    def test_the_document_says_what_every_call_answers(self) -> None:
        for path, methods in self.http.get("/openapi.json").json()["paths"].items():
            for method, operation in methods.items():
                statuses = set(operation["responses"])
                self.assertEqual({"400", "default"}, statuses - {"200", "204"}, f"{method} {path}")
                self.assertEqual(1, len(statuses & {"200", "204"}), f"{method} {path}")


class VersionsTest(SiteTest):
    """A client of a later version asks."""

    cache = "group"

    def test_fields_that_are_not_known_are_ignored(self) -> None:
        asked: list[tuple[str, str, dict[str, Any]]] = [
            ("PUT", "/v1/vms/vm", {"image": "debian", "later": {"than": 1}}),
            ("POST", "/v1/vms/vm/boot", {"image": "debian", "memory": 64, "network": "none", "tpm": True}),
            ("POST", "/v1/vms/vm/stop", {"force": True, "why": "tired"}),
            ("POST", "/v1/cache/volumes", {"path": "/dev/sdx", "share": 0.5}),
            ("DELETE", "/v1/cache/volumes?path=/dev/sdx&wipe=1", {}),
        ]
        for method, path, body in asked:
            answer = self.http.request(method, path, json=body)
            self.assertFalse(answer.is_error, f"{method} {path}: {answer.text}")


class SecretsTest(SiteTest):
    """What the host shares with its parents and children."""

    def setUp(self) -> None:
        self.logged = Logged(self, "")  # hears of the agent's start, too
        super().setUp()
        self.client.create("vm", "debian")
        self.site.volt.assign("debian", ["new", "other"], ["child"])
        self.client.repair()  # lets the heartbeat come soon
        # The record is written twice, the second time when the new parents are in use.
        wait_until(lambda: [(r.revision, len(r.children)) for r in self.agent.stacks.records.all()] == [(2, 1)])
        self.record = self.site.config.state / "records" / "images" / "debian.json"
        # Of each edge, of each parent's ticket, and the serving key.
        self.assertEqual(6, self.record.read_text().count(SECRET))

    def test_no_answer_and_no_line_of_the_log_has_one(self) -> None:
        self.client.publish("mine", self.site.image_file())
        paths = ("status", "images", "images/debian/tree", "vms", "vms/vm", "vms/none", "cache/volumes")
        answers = [self.http.get(f"/v1/{path}").text for path in paths]
        answers += [self.http.post(f"/v1/{path}").text for path in ("gc", "repair", "suspend")]
        said = "\n".join([*answers, *self.logged.lines])
        self.assertThat(said, Contains("unix:///run/other/serve"))
        self.assertThat(said, Contains("dropping the old parents"))
        self.assertNotIn(SECRET, said)


class ClientTest(SiteTest):
    def test_names_that_lead_elsewhere_and_what_is_not_utf_8_go_nowhere(self) -> None:
        for said, call in (
            ("vm name 'vm/snapshots/x'", lambda: self.client.destroy("vm/snapshots/x")),
            ("snapshot name 'x?y'", lambda: self.client.delete_snapshot("vm", "x?y")),
            (r"path '/\udcff'", lambda: self.client.publish("mine", Path("/\udcff"))),
            ("image name", lambda: self.client.publish("\udcff", Path("/a"))),
            ("image name", lambda: self.client.create("vm", "\udcff")),
            ("image name", lambda: self.client.boot("vm", "\udcff")),
            (r"not UTF-8: '\udcff'", lambda: self.client.boot("vm", "debian", network="\udcff")),
        ):
            error = self.assertRaises(BadRequest, call)
            self.assertThat(str(error), Contains(said))
        self.assertEqual([], self.site.host.calls)


class VolumesTest(SiteTest):
    cache = "group"

    def paths(self) -> list[str]:
        return [volume.path for volume in self.client.volumes()]

    def test_a_path_arrives_as_it_is(self) -> None:
        for path in ("/a b", "/a&path=/b", "/ä%2Fö", "/a+b", "/a?#;c", "/[x]", "/a/../b"):
            self.client.add_volume(Path(path))
            self.assertIn(path, self.paths())
            self.client.remove_volume(Path(path))
            self.assertEqual([POOL.path], self.paths())


class DevicesTest(SiteTest):
    """Devices of others, for which one that is over nothing stands."""

    cache = "group"

    def setUp(self) -> None:
        super().setUp()
        self.device = some_device(self)

    def test_what_is_no_device_is_refused(self) -> None:
        for path in (Path("/nonexistent"), Path("/dev/null"), self.site.image_file(), self.site.folder):
            for passed in (False, True):
                error = self.assertRaises(BadDevice, self.client._attach_cached, path, passed=passed)
                self.assertThat(str(error), Contains(f"{path} is not read through the cache: "))
        for bad in BAD_PATHS:
            self.assertRaises(BadRequest, self.client.attach_cached, Path(bad))
            self.assertRaises(BadRequest, self.client.detach_cached, Path(bad))
        self.assertEqual([], self.site.host.calls)

    def test_what_is_passed_is_the_device_that_is_named_and_may_be_written(self) -> None:
        other = some_device(self, but=self.device)
        for opened, flags, said in (
            (other, os.O_RDWR, "what was opened is another device"),
            (self.device, os.O_RDONLY, "not opened for reading and writing"),
        ):
            fd = os.open(opened, flags)
            self.addCleanup(os.close, fd)
            passed = Passed(fd, self.device, trusted=False)
            error = self.assertRaises(BadDevice, self.agent.devices.attach, self.device, passed)
            self.assertThat(str(error), Contains(said))
        self.assertEqual([], self.site.host.calls)


def read_request(request: BinaryIO) -> None:
    """Read one request of HTTP to its end."""
    headers = iter(lambda: request.readline().strip().lower(), b"")
    lengths = [int(header.split(b":")[1]) for header in headers if header.startswith(b"content-length:")]
    request.read(sum(lengths))


@pytest.mark.filterwarnings("ignore:unclosed <socket.socket:ResourceWarning")
class StrangerTest(TestCase):
    """Somebody else listens on the socket, or nobody."""

    def setUp(self) -> None:
        super().setUp()
        # httpcore 1.0 leaves a unix socket that it could not connect to the garbage collector, which warns of it.
        self.addCleanup(gc.collect)
        self.socket = folder_for(self) / "agent.sock"
        self.client = AgentClient(self.socket, timeout=120)
        self.file = self.socket.with_name("x")
        self.file.touch()

    def answer(self, *parts: bytes) -> None:
        """Answer one request with these bytes and hang up."""
        listener = self.enterContext(socket.socket(socket.AF_UNIX))
        listener.bind(str(self.socket))
        listener.listen()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer, peer.makefile("rb") as request:
                read_request(request)  # all of it: to hang up on what was not read resets the connection
                for part in parts:
                    peer.sendall(part)

        thread = threading.Thread(target=serve)
        self.addCleanup(thread.join)
        thread.start()

    def lines(self, *lines: object) -> bytes:
        body = "".join(json.dumps(line) + "\n" for line in lines).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\nconnection: close\r\n\r\n" + body

    def test_an_agent_that_dies_during_a_call(self) -> None:
        self.answer()
        error = self.assertRaises(AgentUnreachable, self.client.status)
        self.assertThat(str(error), MatchesRegex(f"no agent answers on {self.socket}: .*$"))

    def test_an_agent_that_dies_during_a_publish(self) -> None:
        self.answer(self.lines({"progress": {"step": "copy", "done": 1, "total": 2}}))
        error = self.assertRaises(AgentUnreachable, self.client.publish, "x", self.file)
        self.assertThat(str(error), Contains("before it was done"))

    def test_an_error_of_a_later_agent(self) -> None:
        body = b'{"type": "urn:virtman:problem:melted", "title": "", "status": 418, "detail": "too hot"}'
        self.answer(b"HTTP/1.1 418 Melted\r\nconnection: close\r\n\r\n" + body)
        error = self.assertRaises(AgentFailed, self.client.status)
        self.assertEqual("too hot", str(error))

    def json(self, answer: object) -> None:
        """Answer one request with a JSON document."""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
        self.answer(head + json.dumps(answer).encode())

    def test_an_answer_of_a_later_agent(self) -> None:
        disk = {"image": "debian", "size": 512, "phase": "migrating", "snapshots": [{"name": "monday"}]}
        machine = {
            "state": "hibernating", "memory": 64, "cpus": 1, "network": "none", "console_log": "/x", "accel": "hvf",
            "tpm": True,
        }  # fmt: skip
        later = {"name": "vm", "uuid": str(UUID(int=7)), "disk": disk, "machine": machine, "disks": []}
        self.json({"vms": [later], "next": None})
        (vm,) = self.client.vms()
        self.assertEqual(("hibernating", "migrating"), (vm.state, vm.disk.phase))

    def test_an_answer_of_somebody_else(self) -> None:
        self.json({"vms": "none"})
        error = self.assertRaises(AgentFailed, self.client.vms)
        self.assertThat(str(error), Contains("vms: "))
        self.assertEqual(1, len(str(error).splitlines()))
