"""The server that answers no request."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path

from testtools import TestCase

from drivers.nbd.hold import HoldingServer
from drivers.nbd.probe import Client

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
