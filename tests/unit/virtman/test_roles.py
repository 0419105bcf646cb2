"""What operators may do, and that the kernel is asked who calls."""

from __future__ import annotations

import grp
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

from testtools import TestCase
from testtools.matchers import Contains, StartsWith

from tests.doubles.servers import serve_agent
from tests.others import GROUP, NOBODY, as_nobody
from tests.unit.virtman.agents import MIB, SiteCase
from tests.unit.virtman.devices import some_device
from tests.unit.virtman.scene import BOOT, folder_for
from virtman import attaching, booting, creating, disks
from virtman.agent import Agent
from virtman.api import MAX_BODY, PEER, create_app
from virtman.client import AgentClient
from virtman.errors import Forbidden
from virtman.peer import Peer, peer_of
from virtman.pipe import Pipe
from virtman.roles import FOR_ALL, FOR_OPERATORS, permit_of


def _post(client: AgentClient, path: str, body: dict[str, str]) -> str:
    """As somebody asks who writes a client of his own."""
    with client._answer("POST", path, body, 60) as answer:
        return answer.read().decode()


OPERATOR = Peer(pid=1, uid=NOBODY, gid=NOBODY)
ROOT = Peer(pid=1, uid=0, gid=0)

FOR_ADMINISTRATORS = {
    ("POST", "/v1/gc"), ("GET", "/v1/gc"), ("POST", "/v1/repair"), ("POST", "/v1/suspend"),
    ("GET", "/v1/cache/volumes"), ("POST", "/v1/cache/volumes"), ("DELETE", "/v1/cache/volumes"),
    ("PUT", "/v1/images/<image>/hydration"), ("DELETE", "/v1/images/<image>/hydration"),
    ("GET", "/v1/hosts"), ("DELETE", "/v1/deployments/<deployment>"),
    ("POST", "/v1/vms/<vm>/boot"), ("POST", "/v1/vms/<vm>/start"), ("POST", "/v1/vms/<vm>/stop"),
    ("GET", "/v1/vms/<vm>/console"), ("PUT", "/v1/vms/<vm>/disks/<disk>"), ("DELETE", "/v1/vms/<vm>/disks/<disk>"),
    ("GET", "/v1/vms/<vm>/migration-source"), ("POST", "/v1/vms/<vm>/migration"), ("DELETE", "/v1/vms/<vm>/migration"),
    ("POST", "/v1/vms/<vm>/migration/take-back"), ("POST", "/v1/vms/<vm>/migration/end"),
    ("POST", "/v1/arrivals/check"), ("POST", "/v1/vms/<vm>/arrival/give-up"), ("POST", "/v1/vms/<vm>/arrival"),
    ("POST", "/v1/vms/<vm>/arrival/end"),
}  # fmt: skip
"""Somebody has thought about each call whether it is for operators: it is here, or in ``virtman.roles``."""


class RoutesTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.app = create_app(cast("Agent", None))
        rules = self.app.url_map.iter_rules()
        calls = {(method, rule.rule) for rule in rules for method in (rule.methods or ()) if method != "OPTIONS"}
        self.calls = {call for call in calls if call in FOR_ALL or call[1].startswith("/v1/")}
        """All of ours: Flask adds some of its own."""

    def status(self, peer: Peer | None, method: str, rule: str) -> int:
        """How a call without a body is answered."""
        client = self.app.test_client()
        client.environ_base.update({PEER: peer} if peer is not None else {})  # type: ignore[dict-item]
        path = rule.replace("<", "").replace(">", "")
        return client.open(path, method=method, data="{", content_type="application/json").status_code

    def test_of_every_call_it_is_said_whose_it_is(self) -> None:
        known = FOR_ALL | FOR_OPERATORS | FOR_ADMINISTRATORS
        self.assertEqual(known, {(method, rule) for method, rule in self.calls if method != "HEAD"})
        self.assertEqual(frozenset(), FOR_OPERATORS & FOR_ADMINISTRATORS)

    def test_operators_make_no_others(self) -> None:
        for rule in ("/", "/static/<filename>"):
            self.assertEqual(403, self.status(OPERATOR, "GET", rule), rule)
        for method, rule in FOR_ADMINISTRATORS:
            self.assertEqual(403, self.status(OPERATOR, method, rule), f"{method} {rule}")
            if method == "GET":
                self.assertEqual(403, self.status(OPERATOR, "HEAD", rule), rule)
            self.assertEqual(403, self.status(OPERATOR, "OPTIONS", rule), rule)

    def test_operators_make_theirs_and_administrators_all(self) -> None:
        for method, rule in FOR_OPERATORS:
            self.assertNotEqual(403, self.status(OPERATOR, method, rule), f"{method} {rule}")
        for method, rule in FOR_ADMINISTRATORS:
            self.assertNotEqual(403, self.status(ROOT, method, rule), f"{method} {rule}")

    def test_who_is_not_known_makes_none(self) -> None:
        for method, rule in self.calls - FOR_ALL - {("HEAD", rule) for _, rule in FOR_ALL}:
            self.assertEqual(403, self.status(None, method, rule), f"{method} {rule}")
        self.assertEqual(200, self.status(None, "GET", "/openapi.json"))

    def test_a_header_does_not_say_who_calls(self) -> None:
        answer = self.app.test_client().get("/v1/status", headers={PEER: "root", "HTTP_VIRTMAN_PEER": "root"})
        self.assertEqual(403, answer.status_code)


class PeerTest(TestCase):
    def test_this_user_and_root_administer(self) -> None:
        for uid, administers in ((0, True), (os.geteuid(), True), (NOBODY, False)):
            self.assertEqual(administers, Peer(1, uid, 0).administers)

    def test_people_are_told_the_user(self) -> None:
        self.assertEqual("user nobody", str(OPERATOR))
        self.assertEqual("user 3999999999", str(Peer(1, 3999999999, 0)))

    def test_the_kernel_says_who_it_is(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.assertEqual(Peer(os.getpid(), os.geteuid(), os.getegid()), peer_of(ours))


class SocketCase(SiteCase):
    """Nobody calls a whole agent, by its socket, as a member of its group."""

    def setUp(self) -> None:
        super().setUp()
        self.gid = grp.getgrnam(GROUP).gr_gid
        self.folder = folder_for(self)
        self.folder.chmod(0o711)
        self.socket = self.folder / "agent.sock"
        self.serve(self.gid)

    def serve(self, gid: int | None) -> None:
        serve_agent(self, create_app(self.agent), self.socket, gid)

    def as_nobody(self, act: Callable[[AgentClient], object], groups: tuple[int, ...] | None = None) -> str:
        def call() -> object:
            client = AgentClient(self.socket, timeout=60)
            return act(client)

        AgentClient(self.socket).vms()  # imports all that a call needs
        return as_nobody(self, call, (self.gid,) if groups is None else groups)


class BootedTest(SocketCase):
    """What operators may not do with a VM that ``virtman boot`` made."""

    def setUp(self) -> None:
        super().setUp()
        booting.boot(self.agent.vms, "web", "debian", None, BOOT, [], None)
        disks.take(self.agent.vms, "web", "then")
        creating.create(self.agent.vms, "data", "debian", None)

    def check_refused(self, vm: str) -> None:
        calls: list[Callable[[AgentClient], object]] = [
            lambda client: client.destroy(vm),
            lambda client: client.rename(vm, "new"),
            lambda client: client.resize(vm, 2 * MIB),
            lambda client: client.take_snapshot(vm, "now"),
            lambda client: client.revert(vm, "then"),
            lambda client: client.delete_snapshot(vm, "then"),
        ]
        before = self.told()
        for call in calls:
            self.assertThat(self.as_nobody(call), StartsWith("Forbidden: user nobody may not change vm 'web'"))
        self.assertEqual(before, self.told())

    def told(self) -> list[object]:
        overview = self.agent.overview
        return [overview.vm("web"), overview.vm("data"), overview.snapshots("web")]

    def test_they_change_nothing_of_it_nor_of_a_disk_that_it_uses(self) -> None:
        self.check_refused("web")
        booting.stop(self.agent.vms, "web", force=True)
        attaching.attach(self.agent.vms, "web", "data")
        self.check_refused("data")

    def test_one_that_is_booted_meanwhile_is_not_destroyed(self) -> None:
        asked: list[str] = []

        def permit(record):  # type: ignore[no-untyped-def]
            asked.append(record.name)
            permit_of(OPERATOR)(record)
            if len(asked) == 2 and not self.agent.vms.locks.taken("data"):  # before its power is cut
                booting.boot(self.agent.vms, "data", "debian", None, BOOT, [], None)

        self.assertRaises(Forbidden, creating.destroy, self.agent.vms, "data", permit)
        self.assertEqual("running", self.agent.overview.vm("data").state)

    def test_all_else_is_theirs(self) -> None:
        def change(client: AgentClient) -> object:
            client.clone("web", ["copy"])
            client.take_snapshot("copy", "then")
            client.resize("copy", 2 * MIB)
            client.revert("copy", "then")
            client.delete_snapshot("copy", "then")
            client.rename("copy", "new")
            client.destroy("new")
            return [vm.name for vm in client.vms()]

        self.assertEqual("['data', 'web']", self.as_nobody(change))


class SocketTest(SocketCase):
    def test_a_long_body_is_not_taken(self) -> None:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(60)
            caller.connect(str(self.socket))
            caller.sendall(f"POST /v1/gc HTTP/1.1\r\nHost: x\r\nContent-Length: {2 * MAX_BODY + 1}\r\n\r\n".encode())
            self.assertIn(b" 413 ", caller.recv(4096).splitlines()[0])

    def test_members_alone_reach_it_and_without_a_group_nobody_does(self) -> None:
        self.assertEqual("[]", self.as_nobody(lambda client: client.vms()))
        self.assertThat(self.as_nobody(lambda client: client.vms(), ()), StartsWith("AgentUnreachable: "))
        self.socket = self.folder / "other.sock"
        self.serve(None)
        self.assertThat(self.as_nobody(lambda client: client.vms()), StartsWith("AgentUnreachable: "))

    def test_a_member_is_an_operator(self) -> None:
        self.assertEqual("vm", self.as_nobody(lambda client: client.create("vm", "debian").name))
        said = self.as_nobody(lambda client: client.destroy("vm"))
        self.assertEqual("None", said)
        self.assertEqual([], self.agent.overview.vms())
        for call in (lambda client: client.repair(), lambda client: client.boot("vm", "debian")):
            self.assertThat(self.as_nobody(call), StartsWith("Forbidden: user nobody may not do this"))

    def file(self, mode: int) -> Path:
        file = self.site.image_file()
        file.chmod(mode)
        self.site.folder.chmod(0o711)
        return file

    def test_a_link_to_what_only_root_reads_is_not_published(self) -> None:
        link = self.folder / "link"
        link.symlink_to(self.file(0o600))
        said = self.as_nobody(lambda client: client.publish("stolen", link))
        self.assertEqual(f"BadImageFile: cannot read {link}: Permission denied", said)
        asked = {"name": "stolen", "file": str(link)}
        said = self.as_nobody(partial(_post, path="/v1/images", body=asked))
        self.assertThat(said, StartsWith(f"Forbidden: user nobody may not have the agent open {link}"))
        self.assertNotIn("stolen", [image.name for image in self.agent.overview.images()])

    def test_what_a_member_may_read_is_published(self) -> None:
        file = self.file(0o644)
        self.assertThat(self.as_nobody(lambda client: client.publish("mine", file).name), Contains("mine"))

    def test_a_member_has_devices_cached_that_he_may_write(self) -> None:
        self.agent = self.site.restart(cache="group")
        self.socket = self.folder / "other.sock"
        self.serve(self.gid)
        device = some_device(self)
        said = self.as_nobody(lambda client: client.attach_cached(device).path)
        self.assertEqual(f"BadDevice: {device} is not read through the cache: Permission denied", said)
        said = self.as_nobody(partial(_post, path="/v1/cache/devices", body={"path": str(device)}))
        self.assertThat(said, StartsWith(f"Forbidden: user nobody may not have the agent open {device}"))
        path = str(self.agent.devices.attach(device).path)
        self.assertEqual(path, self.as_nobody(lambda client: client.cached_devices()[0].path))
        self.as_nobody(lambda client: client.detach_cached(Path(path)))
        self.assertEqual([], self.agent.overview.devices())

    def test_no_file_is_written_with_the_agents_rights(self) -> None:
        creating.create(self.agent.vms, "vm", "debian", None)
        target = self.folder / "target"
        asked = {"file": str(target), "format": "raw"}
        for path in ("/v1/vms/vm/export", "/v1/images/debian/export"):
            said = self.as_nobody(partial(_post, path=path, body=asked))
            self.assertThat(said, StartsWith("Forbidden: "))
        said = self.as_nobody(lambda client: client.export_vm("vm", target))
        self.assertEqual(f"HostTrouble: writing {target}: Permission denied", said)
        self.assertFalse(target.exists())

    def test_a_named_file_is_still_roots_to_ask_for(self) -> None:
        file = self.file(0o600)
        asked = {"name": "old", "file": str(file)}
        self.assertThat(_post(AgentClient(self.socket), "/v1/images", asked), Contains('"name":"old"'))

    def test_a_stream_is_a_members_own(self) -> None:
        creating.create(self.agent.vms, "vm", "debian", None)
        pipe = Pipe(self.agent.config.socket.parent, NOBODY)
        self.addCleanup(pipe.close)
        found = pipe.path.stat()
        self.assertEqual((NOBODY, 0o600), (found.st_uid, found.st_mode & 0o777))
