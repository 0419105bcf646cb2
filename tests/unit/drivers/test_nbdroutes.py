"""Routes to parents that go, over servers that greet and answer nothing."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from testtools import TestCase

from drivers.attach.nbd import NbdAttach
from drivers.base import Endpoint, Image, Parent, PathState, Place
from drivers.nbd.endpoints import socket_of
from drivers.nbd.hold import HoldingServer
from tests.userspace.drivers.hosts import until

IMAGE = Image("img", 1 << 20, f"sha256:{'a' * 64}")
ACTIVE, STANDBY, LOST = PathState.ACTIVE, PathState.STANDBY, PathState.LOST


class FailOverTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="vm-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.lost: list[str] = []
        place = Place(self.folder, self.folder, host="here", address="")
        self.attach = NbdAttach(place, lost=lambda _image, parent: self.lost.append(parent.host))
        self.addCleanup(self.attach.close)
        self.parents = [Parent(host, f"unix://{self.folder}/{host}", "") for host in ("a", "b")]
        self.a, self.b = (self.serve(parent) for parent in self.parents)
        self.attach.connect(IMAGE, self.parents)

    def serve(self, parent: Parent) -> ExitStack:
        """A server of the parent's that may be closed again."""
        path = socket_of(Endpoint(parent.address, IMAGE.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        server = ExitStack()
        server.enter_context(HoldingServer(path, IMAGE.size))
        self.addCleanup(server.close)
        return server

    def states(self) -> list[PathState]:
        return [path.state for path in self.attach.paths(IMAGE.name)]

    def test_the_next_parent_is_read_from_and_the_lost_one_told_of_once(self) -> None:
        self.assertEqual([ACTIVE, STANDBY], self.states())
        self.a.close()
        until(lambda: bool(self.lost))
        self.assertEqual((["a"], [LOST, ACTIVE]), (self.lost, self.states()))

    def test_no_parent_is_active_while_none_serves(self) -> None:
        self.b.close()
        self.a.close()
        until(lambda: bool(self.lost))
        self.assertEqual((["a"], [LOST, LOST]), (self.lost, self.states()))
        self.serve(self.parents[0])
        until(lambda: self.states() == [ACTIVE, LOST])
        self.assertEqual(["a"], self.lost, "it is back")
