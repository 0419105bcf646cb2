"""Connections to servers that do not answer any more, on the loopback device."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
import sys

from testtools import TestCase

from drivers.kernel import tcpsockets
from lab.process import attempts

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # Linux: filter.h, BPF_RET | BPF_K with 0 bytes to keep
SILENCE, PATIENCE = 0.3, 10.0


def deafen(connection: socket.socket) -> None:
    """Have the kernel drop all that comes in, unseen, as if the machine were off."""
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))


def is_silent(connection: socket.socket) -> bool:
    """As the kernel tells it to those who have the connection (Linux: tcp.h, struct tcp_info)."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return info[2] >= 2 and int.from_bytes(info[56:60], sys.byteorder) >= 1000 * SILENCE


class SilentServerTest(TestCase):
    """A client and its servers, of which the last one answers."""

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

    def end_silent(self, servers: list[tuple[str, int]]) -> list[tuple[str, int]]:
        try:
            return tcpsockets.end_silent(servers, SILENCE)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP):
                self.skipTest(f"this kernel, or this user, cannot end connections: {error.strerror}")
            raise

    def deafen(self, number: int) -> None:
        deafen(self.served[number])
        self.clients[number].send(b"hello?")

    def wait_until_ended(self, *numbers: int) -> None:
        left = {self.servers[number] for number in numbers}
        for _ in attempts(PATIENCE):
            ended = set(self.end_silent(self.servers))
            self.assertEqual(set(), ended - left)
            left -= ended
            if not left:
                break
        else:
            self.fail("the silence was not noticed")
        for number in numbers:
            self.assertRaises(ConnectionAbortedError, self.clients[number].recv, 1)

    def test_ends_a_connection_to_a_server_that_acknowledges_nothing(self) -> None:
        self.connect("127.0.0.1", "127.0.0.1", "127.0.0.1")
        for number in (0, 1):
            self.deafen(number)
        self.wait_until_ended(0, 1)
        self.served[2].sendall(b"hello")
        self.assertEqual(b"hello", self.clients[2].recv(5))

    def test_ends_one_over_ipv6_as_well(self) -> None:
        self.connect("::1", "127.0.0.1")
        self.deafen(0)
        self.wait_until_ended(0)

    def test_ends_none_when_all_are_silent(self) -> None:
        self.connect("127.0.0.1", "127.0.0.1", "127.0.0.1")
        for number in (0, 1):
            self.deafen(number)
        for _ in attempts(PATIENCE):
            if all(is_silent(client) for client in self.clients[:2]):
                break
        else:
            self.fail("they are not silent")
        for alone in (self.servers[:1], self.servers[:2], []):
            self.assertEqual([], self.end_silent(alone))
        self.assertEqual(self.servers[:2], self.end_silent(self.servers))

    def test_leaves_one_that_is_idle_or_waits_for_a_slow_program(self) -> None:
        self.connect("127.0.0.1", "127.0.0.1")
        self.assertEqual([], self.end_silent(self.servers))
        self.clients[0].send(b"hello?")  # acknowledged by the kernel, read by nobody
        for _ in attempts(3 * SILENCE):
            self.assertEqual([], self.end_silent(self.servers))
        self.served[0].sendall(b"hello")
        self.assertEqual(b"hello", self.clients[0].recv(5))
