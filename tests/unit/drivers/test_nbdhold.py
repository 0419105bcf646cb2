"""The server that answers no request."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path

from testtools import TestCase

from drivers.host.watch import deaths
from drivers.nbd.hold import HoldingServer
from drivers.nbd.probe import Client
from tests.limits import no_more_files
from tests.userspace.drivers.hosts import until

SIZE = 1 << 20


class HoldingServerTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="vm"))
        self.addCleanup(shutil.rmtree, folder)
        self.path = folder / "img.wait"

    def serve(self) -> HoldingServer:
        server = HoldingServer(self.path, SIZE)
        self.addCleanup(server.close)
        return server

    def test_clients_are_told_the_size_under_any_name(self) -> None:
        self.serve()
        for name in ("img", "another"):
            with Client(self.path, name, timeout=120) as client:
                self.assertEqual(SIZE, client.size)

    def test_closing_hangs_up_on_all_and_leaves_nothing(self) -> None:
        server = HoldingServer(self.path, SIZE)
        client = Client(self.path, "img", timeout=120)
        self.addCleanup(client.close)
        server.close()
        self.assertEqual([], list(self.path.parent.iterdir()))
        with socket.socket(fileno=socket.dup(client.fileno())) as connection:
            self.assertEqual(b"", connection.recv(1))

    def test_clients_that_come_when_no_file_can_be_opened_are_let_in_later(self) -> None:
        self.serve()
        first, second = (socket.socket(socket.AF_UNIX) for _ in range(2))
        self.addCleanup(second.close)
        with no_more_files():
            first.connect(str(self.path))  # takes the number that accept(2) has set aside since it was called
            first.close()
            second.connect(str(self.path))
            until(lambda: "hold-img.wait" in [death.thread for death in deaths()])
        second.settimeout(120)
        self.assertEqual(b"NBDMAGIC", second.recv(8))
