"""What the client makes of servers that are not a healthy Volt."""

from __future__ import annotations

import socket
import threading

from testtools import TestCase

from volt.client import VoltClient
from volt.errors import VoltError, VoltUnreachable


class Odd(TestCase):
    """A server that says one thing, whatever it is asked."""

    def client_of(self, answer: bytes | None, timeout: float) -> VoltClient:
        """A client whose server answers one connection with these bytes; with None it stays silent."""
        server = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(server.close)
        over = threading.Event()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                if answer is None:
                    over.wait()
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(over.set)
        client = VoltClient(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=timeout)
        self.addCleanup(client.close)
        return client

    def test_each_has_its_class_of_error(self) -> None:
        for error, said, part in (
            (VoltUnreachable, "", None),
            (VoltUnreachable, "", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"),
            (VoltUnreachable, "", b"SSH-2.0-OpenSSH_9.2\r\n"),
            (VoltError, "hosts", b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"),
            (VoltError, "502", b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n\r\nno"),
            (VoltUnreachable, "", b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"),
        ):
            client = self.client_of(part, timeout=120 if part else 0.2)
            self.assertIn(said, str(self.assertRaises(error, client.hosts)))
