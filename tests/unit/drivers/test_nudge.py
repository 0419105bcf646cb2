"""A connection to iscsid that ends without a request."""

from __future__ import annotations

import socket
import uuid

from testtools import TestCase

from drivers.iscsi.sessions import nudge


class NudgeTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.address = f"\0virtman-test-{uuid.uuid4()}"

    def listener(self, backlog: int) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.addCleanup(listener.close)
        listener.bind(self.address)
        listener.listen(backlog)
        return listener

    def test_somebody_connects_and_says_nothing(self) -> None:
        listener = self.listener(1)
        nudge(self.address)
        listener.setblocking(False)
        connection, _ = listener.accept()
        with connection:
            self.assertEqual(b"", connection.recv(1))

    def test_nobody_may_be_there(self) -> None:
        nudge(self.address)
