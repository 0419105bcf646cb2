"""What the client makes of servers that are not a healthy Volt."""

from __future__ import annotations

import socket
import threading

from testtools import TestCase

from volt.client import VoltClient
from volt.errors import BadAnswer, VoltTimeout, VoltUnreachable


class Odd(TestCase):
    """A server that says one thing, whatever it is asked."""

    def client_of(self, *parts: bytes | None, timeout: float = 120) -> VoltClient:
        """A client whose server answers one connection with these bytes; None keeps it open without a word."""
        server = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(server.close)
        over = threading.Event()

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                for part in parts:
                    if part is None:
                        over.wait()
                    else:
                        connection.sendall(part)

        thread = threading.Thread(target=answer)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(over.set)
        client = VoltClient(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=timeout)
        self.addCleanup(client.close)
        return client

    def test_silence_is_a_timeout(self) -> None:
        self.assertRaises(VoltTimeout, self.client_of(None, timeout=0.2).hosts)

    def test_a_broken_connection_is_unreachable(self) -> None:
        self.assertRaises(VoltUnreachable, self.client_of(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{").hosts)

    def test_another_server_is_a_bad_answer(self) -> None:
        page = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"
        self.assertRaises(BadAnswer, self.client_of(page).hosts)

    def test_an_error_of_another_server_is_a_bad_answer_with_its_status(self) -> None:
        gone = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n\r\nno"
        self.assertIn("502", str(self.assertRaises(BadAnswer, self.client_of(gone).hosts)))
