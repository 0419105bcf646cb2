"""Routes to parents that go, over servers that greet and answer nothing."""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack

from testtools import TestCase

from drivers.attach.nbd import ASK_INTERVAL, NbdAttach
from drivers.attach.quarantine import QUARANTINE
from drivers.base import Image, Parent, PathState, Place
from drivers.nbd.endpoints import socket_of
from drivers.nbd.hold import HoldingServer
from tests.others import as_nobody
from tests.patience import PATIENCE, wait_until
from tests.unit.virtman.scene import folder_for

IMAGE = Image("img", 1 << 20, f"sha256:{'a' * 64}")
_REQUEST, _REPLY, _DISCONNECT = struct.Struct(">IHHQQI"), struct.Struct(">IIQ"), 2
ACTIVE, STANDBY, LOST = PathState.ACTIVE, PathState.STANDBY, PathState.LOST


class AnsweringServer(HoldingServer):
    """Answers reads, of one client after the other."""

    error = 0

    def _negotiate(self, client: socket.socket) -> None:
        super()._negotiate(client)
        client.settimeout(None)
        while len(request := client.recv(_REQUEST.size, socket.MSG_WAITALL)) == _REQUEST.size:
            _, _, command, handle, _, length = _REQUEST.unpack(request)
            if command == _DISCONNECT:
                break
            client.sendall(_REPLY.pack(0x67446698, self.error, handle) + bytes(0 if self.error else length))
        raise ConnectionError("it hung up")


class Failing(AnsweringServer):
    """Answers reads with an error (EIO)."""

    error = 5


class RouteCase(TestCase):
    """A host with some parents."""

    kinds: tuple[type[HoldingServer], ...] = (HoldingServer, HoldingServer)

    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.lost: list[str] = []
        place = Place(self.folder, self.folder, host="here", address="")
        self.now = 1000.0
        self.attach = NbdAttach(
            place, lost=lambda _image, parent: self.lost.append(parent.host), greeting_limit=0.5,
            return_limit=PATIENCE, clock=lambda: self.now,
        )  # fmt: skip
        self.addCleanup(self.attach.close)
        self.parents = [Parent(host, f"unix://{self.folder}/{host}", "") for host in "abc"[: len(self.kinds)]]
        self.a, self.b, *_ = [self.serve(*each) for each in zip(self.parents, self.kinds, strict=True)]
        self.device = self.attach.connect(IMAGE, self.parents)

    def serve(self, parent: Parent, kind: type[HoldingServer] = HoldingServer) -> ExitStack:
        """A server of the parent's that may be closed again."""
        path = socket_of(parent.address, IMAGE.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        server = ExitStack()
        server.enter_context(kind(path, IMAGE.size))
        self.addCleanup(server.close)
        return server

    def first_is_now(self, kind: type[HoldingServer]) -> None:
        """Once the first parent was lost, it is another one."""
        wait_until(lambda: bool(self.lost))
        self.a.close()
        self.a = self.serve(self.parents[0], kind)

    def states(self) -> list[PathState]:
        return [path.state for path in self.attach.paths(IMAGE.name)]

    def await_return(self) -> None:
        """Look again and again, until a better parent has answered."""

        def looks() -> bool:
            self.now += ASK_INTERVAL
            return self.attach.unsettled(IMAGE.name)

        wait_until(looks)


class FailOverTest(RouteCase):
    def test_the_next_parent_is_read_from_and_the_lost_one_told_of_once(self) -> None:
        self.assertEqual([ACTIVE, STANDBY], self.states())
        self.a.close()
        wait_until(lambda: bool(self.lost))
        self.assertEqual((["a"], [LOST, ACTIVE]), (self.lost, self.states()))

    def test_no_parent_is_active_while_none_serves(self) -> None:
        self.b.close()
        self.a.close()
        wait_until(lambda: bool(self.lost))
        self.assertEqual((["a"], [LOST, LOST]), (self.lost, self.states()))
        self.serve(self.parents[0])
        wait_until(lambda: self.states() == [ACTIVE, LOST])
        self.assertEqual(["a"], self.lost, "it is back")


class DeniedTest(TestCase):
    def test_a_parent_that_this_user_may_not_connect_to_is_none(self) -> None:
        folder = folder_for(self)
        folder.chmod(0o777)
        for name, mode in (("shut", 0o700), ("open", 0o711)):
            (folder / name).mkdir()
            (folder / name).chmod(mode)  # whatever the umask
        shut, other = (Parent(name, f"unix://{folder}/{name}", "") for name in ("shut", "open"))

        def connect(parents: list[Parent]) -> list[str]:
            attach = NbdAttach(Place(folder / "run", folder / "run", host="here"), lost=lambda _image, _parent: None)
            attach.connect(IMAGE, parents)
            return [path.parent.host for path in attach.paths(IMAGE.name)]

        said = as_nobody(self, lambda: connect([shut]))
        self.assertIn(
            f"NoParents: image img has no parent to read from: this agent's user may not connect to {folder}", said
        )
        self.assertEqual("['open']", as_nobody(self, lambda: connect([shut, other])))


class Silent(HoldingServer):
    """Does not greet."""

    def _negotiate(self, client: socket.socket) -> None:
        client.recv(1)


class SilentTest(RouteCase):
    kinds = (Silent, AnsweringServer)

    def test_one_that_does_not_greet_is_left(self) -> None:
        wait_until(lambda: bool(self.lost))
        self.assertEqual([STANDBY, ACTIVE], self.states())


class FailingTest(RouteCase):
    kinds = (Failing, HoldingServer, AnsweringServer)

    def test_one_that_fails_reads_is_left_for_one_that_answers_them(self) -> None:
        wait_until(lambda: bool(self.lost))
        self.assertEqual((["a"], [STANDBY, STANDBY, ACTIVE]), (self.lost, self.states()))


class RestTest(RouteCase):
    kinds = (HoldingServer, AnsweringServer)

    def test_one_that_hung_and_answers_after_its_rest_is_read_from_again_by_who_connects(self) -> None:
        self.first_is_now(AnsweringServer)
        self.assertFalse(self.attach.unsettled(IMAGE.name), "it rests")
        self.now += QUARANTINE
        self.await_return()
        device = self.attach.connect(IMAGE, self.parents)
        self.assertNotEqual(self.device, device, "or the daemon would stay with the other one")
        self.assertEqual(([ACTIVE, STANDBY], False), (self.states(), self.attach.unsettled(IMAGE.name)))
