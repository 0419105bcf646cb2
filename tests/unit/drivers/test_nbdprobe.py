"""The NBD client against a server that says what the test wants."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from functools import partial

import testtools

from drivers.errors import NotServing, ProtocolViolated
from drivers.nbd.hold import HoldingServer
from drivers.nbd.probe import ALLOCATION_DEPTH, Client, Extent, knock, listens
from tests.unit.virtman.scene import folder_for

GREETING = b"NBDMAGICIHAVEOPT" + struct.pack(">H", 3)
GO, CONTEXT = 7, 10
ACK, INFO, META = 1, 3, 4
SIZE = 1 << 20

Script = Callable[["Wire"], object]


def option_reply(option: int, kind: int, data: bytes = b"") -> bytes:
    return struct.pack(">QIII", 0x3E889045565A9, option, kind, len(data)) + data


def info(size: int = SIZE) -> bytes:
    return option_reply(GO, INFO, struct.pack(">HQH", 0, size, 3)) + option_reply(GO, ACK)


def chunk(kind: int, data: bytes = b"", flags: int = 1) -> bytes:
    return struct.pack(">IHHQI", 0x668E33EF, flags, kind, 1, len(data)) + data


class Wire:
    """The server's end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def take(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            data += self.sock.recv(length - len(data)) or self.hung_up()
        return data

    def hung_up(self) -> bytes:
        raise ConnectionError

    def greet(self) -> None:
        self.send(GREETING)
        self.take(4)

    def option(self) -> tuple[int, bytes]:
        _, option, length = struct.unpack(">8sII", self.take(16))
        return option, self.take(length)

    def request(self) -> tuple[int, int, int]:
        """Command, offset and length."""
        _, _, command, _, offset, length = struct.unpack(">IHHQQI", self.take(28))
        return command, offset, length

    def negotiate(self, size: int = SIZE, context: bytes = b"") -> None:
        """Grant what a client asks for up to its NBD_OPT_GO."""
        self.greet()
        option = 0
        while option != GO:
            option, _ = self.option()
            if option == CONTEXT:
                self.send(option_reply(option, META, struct.pack(">I", 5) + context))
            self.send(info(size) if option == GO else option_reply(option, ACK))


class ProbeCase(testtools.TestCase):
    def setUp(self) -> None:
        super().setUp()
        folder = folder_for(self)
        self.path = folder / "s"

    def serve(self, script: Script) -> None:
        """Answer one connection by a script; hang up at its end."""
        listener = self.enterContext(socket.socket(socket.AF_UNIX))
        self.path.unlink(missing_ok=True)
        listener.bind(str(self.path))
        listener.listen()

        def answer() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(ConnectionError, struct.error):
                script(Wire(sock))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        self.addCleanup(thread.join, 120)

    def client(self, context: str | None = None) -> Client:
        return self.enterContext(Client(self.path, "img", timeout=120, context=context))

    def refused(self, script: Script, kind: type[Exception], context: str | None = None) -> str:
        self.serve(script)
        return str(self.assertRaises(kind, self.client, context))


class KnockTest(ProbeCase):
    def test_nobody_listens_without_a_socket_or_behind_a_dead_one(self) -> None:
        self.assertFalse(listens(self.path))
        self.assertRaises(NotServing, knock, self.path)
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(self.path))
        self.assertFalse(listens(self.path))

    def test_listener_with_a_full_backlog_listens_all_the_same(self) -> None:
        listener = self.enterContext(socket.socket(socket.AF_UNIX))
        listener.bind(str(self.path))
        listener.listen(0)
        self.addCleanup(knock(self.path).close)
        self.assertRaises(NotServing, knock, self.path)
        self.assertTrue(listens(self.path))


class HandshakeTest(ProbeCase):
    def test_size_of_the_export(self) -> None:
        self.serve(lambda wire: wire.negotiate(size=12345))
        self.assertEqual(12345, self.client().size)

    def test_name_of_the_export_is_asked_for(self) -> None:
        asked: list[bytes] = []

        def script(wire: Wire) -> None:
            wire.greet()
            asked.append(wire.option()[1])
            wire.send(info())

        self.serve(script)
        self.client()
        self.assertEqual([struct.pack(">I", 3) + b"img" + struct.pack(">H", 0)], asked)

    def test_silence_is_not_serving(self) -> None:
        self.serve(lambda wire: wire.take(1))
        self.assertRaises(NotServing, Client, self.path, "img", timeout=0.05)

    def test_greetings_that_break_off_or_are_of_another_protocol(self) -> None:
        for greeting, kind in (
            (GREETING[:5], NotServing),
            (b"HTTP/1.1 400 Bad Request\r\n", ProtocolViolated),
            (GREETING[:16] + b"\0\0", ProtocolViolated),  # the old style
        ):
            self.refused(partial(Wire.send, data=greeting), kind)

    def test_replies_to_the_option_that_give_no_export(self) -> None:
        for reply, why in (
            (option_reply(GO, (1 << 31) + 6, b"no such export"), "no such export"),
            (option_reply(CONTEXT, ACK), ""),  # to another option
            (option_reply(GO, ACK), ""),  # without a size
        ):

            def script(wire: Wire, reply: bytes = reply) -> None:
                wire.greet()
                wire.option()
                wire.send(reply)

            self.assertIn(why, self.refused(script, ProtocolViolated))

    def test_missing_metadata_context_is_refused(self) -> None:
        self.refused(lambda wire: wire.negotiate(context=b"base:allocation"), ProtocolViolated, ALLOCATION_DEPTH)


class ExtentsTest(ProbeCase):
    def extents(self, *replies: bytes, size: int = SIZE) -> list[Extent]:
        def script(wire: Wire) -> None:
            wire.negotiate(size, ALLOCATION_DEPTH.encode())
            for reply in replies:
                self.asked.append(wire.request())
                if not reply:
                    return  # and hang up
                wire.send(reply)
            wire.take(1)

        self.asked: list[tuple[int, int, int]] = []
        self.serve(script)
        return list(self.client(ALLOCATION_DEPTH).extents())

    def status(self, *extents: tuple[int, int], context: int = 5) -> bytes:
        return chunk(5, struct.pack(">I", context) + b"".join(struct.pack(">II", *each) for each in extents))

    def test_one_reply_for_all(self) -> None:
        found = self.extents(self.status((SIZE // 4, 1), (SIZE * 3 // 4, 2)))
        self.assertEqual([Extent(0, SIZE // 4, 1), Extent(SIZE // 4, SIZE * 3 // 4, 2)], found)

    def test_short_replies_are_continued(self) -> None:
        self.extents(self.status((4096, 1)), self.status((SIZE - 4096, 2)))
        self.assertEqual([(7, 0, SIZE), (7, 4096, SIZE - 4096)], self.asked)

    def test_extent_beyond_the_end_is_cut(self) -> None:
        self.assertEqual([Extent(0, SIZE, 1)], self.extents(self.status((SIZE * 2, 1))))

    def test_large_export_is_asked_for_in_parts(self) -> None:
        part = 1 << 30
        found = self.extents(self.status((part, 1)), self.status((part, 2)), size=2 * part)
        self.assertEqual([Extent(0, part, 1), Extent(part, part, 2)], found)

    def test_other_contexts_and_empty_chunks_are_passed_over(self) -> None:
        other = struct.pack(">IHHQI", 0x668E33EF, 0, 5, 1, 12) + struct.pack(">III", 9, 1, 1)
        self.assertEqual([Extent(0, SIZE, 1)], self.extents(other + self.status((SIZE, 1))))

    def test_replies_that_give_no_extents(self) -> None:
        for reply, kind, why in (
            (self.status(), ProtocolViolated, ""),
            (chunk((1 << 15) + 1, struct.pack(">IH", 5, 0)), ProtocolViolated, "Input/output error"),
            (b"x" * 20, ProtocolViolated, ""),
            (b"", NotServing, ""),  # it hangs up
        ):
            self.assertIn(why, str(self.assertRaises(kind, self.extents, reply)))


class FlushTest(ProbeCase):
    def flush(self, reply: bytes) -> None:
        def script(wire: Wire) -> None:
            wire.negotiate()
            self.assertEqual(3, wire.request()[0])
            wire.send(reply)

        self.serve(script)
        self.client().flush()

    def test_only_a_reply_without_an_error_is_a_flush(self) -> None:
        self.flush(struct.pack(">IIQ", 0x67446698, 0, 1))
        for reply in (struct.pack(">IIQ", 0x67446698, 28, 1), b"x" * 16):
            self.assertRaises(ProtocolViolated, self.flush, reply)


class ZeroTest(ProbeCase):
    def test_a_large_range_is_asked_for_in_parts(self) -> None:
        part, asked = 1 << 30, list[tuple[int, int, int]]()

        def script(wire: Wire) -> None:
            wire.negotiate(size=4 * part)
            for _ in range(3):
                asked.append(wire.request())
                wire.send(struct.pack(">IIQ", 0x67446698, 0, 1))

        self.serve(script)
        self.client().zero(4096, 2 * part + 512)
        self.assertEqual([(6, 4096, part), (6, 4096 + part, part), (6, 4096 + 2 * part, 512)], asked)


class CloseTest(ProbeCase):
    def test_goodbye_is_said_once(self) -> None:
        said: list[int] = []

        def script(wire: Wire) -> None:
            wire.negotiate()
            said.append(wire.request()[0])
            said.extend(wire.sock.recv(1))

        self.serve(script)
        client = self.client()
        self.assertNotEqual(-1, client.fileno())
        client.close()
        client.close()
        self.assertEqual(-1, client.fileno())


class HoldingServerTest(ProbeCase):
    """The client against the server that answers no request."""

    def test_clients_are_told_the_size_under_any_name_and_closing_hangs_up_and_leaves_nothing(self) -> None:
        server = HoldingServer(self.path, SIZE)
        clients = [self.enterContext(Client(self.path, name, timeout=120)) for name in ("img", "another")]
        self.assertEqual([SIZE, SIZE], [client.size for client in clients])
        server.close()
        self.assertEqual([], list(self.path.parent.iterdir()))
        with socket.socket(fileno=socket.dup(clients[0].fileno())) as connection:
            self.assertEqual(b"", connection.recv(1))
