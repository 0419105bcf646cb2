"""The NBD client, with QEMU's storage daemon as the server, and with what is no server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

from testtools import TestCase

from drivers.base import BlockNode
from drivers.errors import NbdFailed
from drivers.qemu.monitor import PRIVATE_NODE, private_node
from drivers.qemu.nbdclient import Client
from tests.patience import PATIENCE
from tests.programs import private_daemons, require
from tests.sockets import connected
from tests.unit.virtman.scene import folder_for

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZE = 4 * MIB


class ServedTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        require(self, "qemu-storage-daemon")
        self.folder = folder_for(self)
        self.file = self.folder / "disk"
        self.file.write_bytes(b"x" * SIZE)
        self.raw = {"driver": "file", "filename": str(self.file), "discard": "unmap"}

    @contextlib.contextmanager
    def served(self, node: BlockNode, *, export: str = "disk") -> Iterator[Client]:
        """A client of a node that a storage daemon serves as ``disk``."""
        path = self.folder / "sock"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            with private_node("vm", node, listener) as monitor:
                served = {"type": "nbd", "id": "disk", "name": "disk", "node-name": PRIVATE_NODE, "writable": True}
                monitor.execute("block-export-add", served)
                with Client(connected(path), export, timeout=PATIENCE) as client:
                    yield client

    def test_what_is_written_and_zeroed_is_read_and_is_in_the_file(self) -> None:
        with self.served(self.raw) as client:
            client.write(MIB, b"y" * MIB)
            client.zero(2 * MIB, MIB)
            client.flush()
            self.assertEqual(b"xy\0x", b"".join(client.read(number * MIB, MIB)[:1] for number in range(4)))
            self.assertEqual(SIZE, client.size)
        content = self.file.read_bytes()
        self.assertEqual(b"x" * MIB + b"y" * MIB + bytes(MIB) + b"x" * MIB, content)

    def test_zeros_for_a_range_that_no_request_has_room_for(self) -> None:
        with self.served({"driver": "null-co", "size": 8 * GIB}) as client:
            client.zero(4096, 6 * GIB + 512)

    def test_an_error_of_the_server_is_told_and_the_next_request_is_answered(self) -> None:
        broken = {"driver": "blkdebug", "image": self.raw, "inject-error": [{"event": "none", "errno": 28}]}
        with self.served(broken) as client:
            for ask in (lambda: client.read(0, KIB), lambda: client.write(0, b"y" * KIB), lambda: client.zero(0, KIB)):
                self.assertEqual(28, self.assertRaises(OSError, ask).errno)

    def test_an_export_that_is_not_there_is_refused(self) -> None:
        with self.served(self.raw, export="disk"):
            error = self.assertRaises(NbdFailed, Client, connected(self.folder / "sock"), "other", timeout=PATIENCE)
        self.assertIn("refuses", str(error))

    def test_a_server_that_dies_is_told_of(self) -> None:
        with contextlib.suppress(NbdFailed), self.served(self.raw) as client:
            for pid in private_daemons(os.getpid()):
                os.kill(pid, signal.SIGKILL)
            self.assertRaises(NbdFailed, client.read, 0, KIB)
            raise NbdFailed("so that nobody asks the dead daemon to quit")


class NoServerTest(TestCase):
    def failed(self, greeting: bytes, *, hung_up: bool = False, timeout: float = PATIENCE) -> str:
        """Why there is no client of one that begins so. The client's socket is closed."""
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(greeting)
            if hung_up:
                theirs.shutdown(socket.SHUT_WR)
            error = self.assertRaises(NbdFailed, Client, ours, "disk", timeout=timeout)
        self.assertEqual(-1, ours.fileno())
        return str(error)

    def test_silence_ends_the_wait(self) -> None:
        self.assertIn("timed out", self.failed(b"", timeout=0.05))

    def test_one_that_hangs_up_is_told_of(self) -> None:
        self.assertIn("hung up", self.failed(b"NBDMA", hung_up=True))

    def test_another_protocol_and_the_old_style_are_refused(self) -> None:
        for greeting in (b"HTTP/1.1 400 Bad Request\r\n", b"NBDMAGICIHAVEOPT\0\0"):
            self.assertIn("greets", self.failed(greeting))
