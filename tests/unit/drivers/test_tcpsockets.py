"""Connections to servers that do not answer any more, on the loopback device."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct

from testtools import TestCase

from drivers.kernel import tcpsockets
from drivers.kernel.tcpsockets import Link
from lab.process import attempts

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # Linux: filter.h, BPF_RET | BPF_K with 0 bytes to keep
SILENCE, PATIENCE = 0.3, 10.0


def deafen(connection: socket.socket) -> None:
    """Have the kernel drop all that comes in, unseen, as if the machine were off."""
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))


class SilentServerTest(TestCase):
    """Clients and their servers."""

    def setUp(self) -> None:
        super().setUp()
        self.servers: list[tuple[str, int]] = []
        self.clients: list[socket.socket] = []
        self.served: list[socket.socket] = []

    def connect(self, *ips: str) -> None:
        for ip in ips:
            server = socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)
            self.addCleanup(server.close)
            self.servers.append((ip, int(server.getsockname()[1])))
            self.clients.append(socket.create_connection(self.servers[-1]))
            self.addCleanup(self.clients[-1].close)
            self.served.append(server.accept()[0])
            self.addCleanup(self.served[-1].close)

    def link(self, number: int) -> Link:
        return Link(*self.servers[number], self.clients[number].getsockname()[1])

    def silent(self, number: int) -> bool:
        try:
            return tcpsockets.is_silent(self.link(number), SILENCE)
        except OSError as error:
            self.skip_if_unable(error)
            raise

    def end(self, number: int) -> None:
        try:
            tcpsockets.end(self.link(number))
        except OSError as error:
            self.skip_if_unable(error)
            raise

    def skip_if_unable(self, error: OSError) -> None:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP):
            self.skipTest(f"this kernel, or this user, cannot look at connections or end them: {error.strerror}")

    def deafen(self, number: int) -> None:
        deafen(self.served[number])
        self.clients[number].send(b"hello?")

    def wait_until_silent(self, number: int) -> None:
        for _ in attempts(PATIENCE):
            if self.silent(number):
                return
        self.fail("the silence was not noticed")

    def test_one_that_acknowledges_nothing_is_silent_and_no_other(self) -> None:
        self.connect("127.0.0.1", "127.0.0.1")
        self.deafen(0)
        self.wait_until_silent(0)
        self.assertFalse(self.silent(1))

    def test_ends_one_connection_to_a_server_and_leaves_another_to_the_same(self) -> None:
        self.connect("127.0.0.1")
        second = socket.create_connection(self.servers[0])
        self.addCleanup(second.close)
        self.end(0)
        self.assertRaises(ConnectionAbortedError, self.clients[0].recv, 1)
        second.sendall(b"hello")
        self.end(0)  # what has ended is no error

    def test_one_that_is_idle_or_waits_for_a_slow_program_is_not_silent(self) -> None:
        self.connect("127.0.0.1")
        self.assertFalse(self.silent(0))
        self.clients[0].send(b"hello?")  # acknowledged by the kernel, read by nobody
        for _ in attempts(3 * SILENCE):
            self.assertFalse(self.silent(0))
        self.served[0].sendall(b"hello")
        self.assertEqual(b"hello", self.clients[0].recv(5))

    def test_a_connection_is_told_of(self) -> None:
        self.connect("127.0.0.1")
        with socket.create_server(("127.0.0.1", 0)) as idle:
            try:
                found = [tcpsockets.connected(*each) for each in (self.servers[0], idle.getsockname())]
            except OSError as error:
                self.skip_if_unable(error)
                raise
        self.assertEqual([True, False], found)


class SilenceTest(TestCase):
    """What the kernel tells of a connection (Linux: include/uapi/linux/tcp.h, struct tcp_info)."""

    def test_is_two_sendings_and_so_long_without_an_answer(self) -> None:
        def told(sendings: int, heard: int) -> bytes:
            return bytes([1, 0, sendings]).ljust(56, b"\0") + struct.pack("=I", heard)

        cases = ((2, 1000), (2, 999), (1, 5000))
        self.assertEqual([True, False, False], [tcpsockets.silent(told(*case), 1.0) for case in cases])
