"""Connections to servers that do not answer any more, on the loopback device."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct

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


class SilentServerTest(TestCase):
    """A client and a server."""

    def connect(self, family: socket.AddressFamily, ip: str) -> None:
        server = socket.create_server((ip, 0), family=family)
        self.addCleanup(server.close)
        self.ip, self.port = ip, int(server.getsockname()[1])
        self.client = socket.create_connection((ip, self.port))
        self.addCleanup(self.client.close)
        self.served, _ = server.accept()
        self.addCleanup(self.served.close)

    def end_silent(self) -> bool:
        try:
            return tcpsockets.end_silent(self.ip, self.port, SILENCE)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP):
                self.skipTest(f"this kernel, or this user, cannot end connections: {error.strerror}")
            raise

    def assert_ends_when_deaf(self) -> None:
        deafen(self.served)
        self.client.send(b"hello?")
        for _ in attempts(PATIENCE):
            if self.end_silent():
                break
        else:
            self.fail("the silence was not noticed")
        self.assertRaises(ConnectionAbortedError, self.client.recv, 1)

    def test_ends_a_connection_to_a_server_that_acknowledges_nothing(self) -> None:
        self.connect(socket.AF_INET, "127.0.0.1")
        self.assert_ends_when_deaf()

    def test_ends_one_over_ipv6_as_well(self) -> None:
        self.connect(socket.AF_INET6, "::1")
        self.assert_ends_when_deaf()

    def test_leaves_one_that_is_idle_or_waits_for_a_slow_program(self) -> None:
        self.connect(socket.AF_INET, "127.0.0.1")
        self.assertFalse(self.end_silent())
        self.client.send(b"hello?")  # acknowledged by the kernel, read by nobody
        for _ in attempts(3 * SILENCE):
            self.assertFalse(self.end_silent())
        self.served.sendall(b"hello")
        self.assertEqual(b"hello", self.client.recv(5))
