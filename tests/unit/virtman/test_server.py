"""What the agent tells systemd."""

from __future__ import annotations

import socket

from testtools import TestCase

from tests.unit.virtman.scene import folder_for
from virtman.server import tell_ready


class TellReadyTest(TestCase):
    def listener(self, address: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(listener.close)
        listener.settimeout(10)
        listener.bind(address)
        return listener

    def test_systemd_hears_it(self) -> None:
        path = str(folder_for(self) / "notify")
        listener = self.listener(path)
        tell_ready(path)
        self.assertEqual(b"READY=1", listener.recv(100))

    def test_systemd_hears_it_at_an_address_without_a_file(self) -> None:
        name = f"virtman-test-{folder_for(self).name}"
        listener = self.listener(f"\0{name}")
        tell_ready(f"@{name}")
        self.assertEqual(b"READY=1", listener.recv(100))

    def test_nobody_to_tell_is_fine(self) -> None:
        tell_ready("")
        tell_ready(str(folder_for(self) / "gone"))
