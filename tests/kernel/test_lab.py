"""What tests with several guests may rely on."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from pathlib import Path

import pytest

from lab.errors import CommandFailed
from lab.kernel.machine import Machine
from tests.kernel.machines import KernelCase
from tests.patience import PATIENCE

CONNECT = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 120).recv(3).decode())"


def greeting(machine: Machine, address: str, port: int) -> str:
    """The first bytes that a server says to a guest."""
    return machine.run(["python3", "-c", CONNECT, address, str(port)]).strip()


class NetworkTest(KernelCase):
    def test_guests_reach_each_other(self) -> None:
        self.assertEqual("SSH", greeting(self.host, self.origin.address, 22))

    def test_guests_reach_servers_on_this_machine(self) -> None:
        server = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(server.close)
        server.settimeout(300)
        port = server.getsockname()[1]
        process = self.host.begin(["python3", "-c", CONNECT, "10.0.2.2", str(port)])
        self.addCleanup(process.communicate)
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"hey")
        self.assertEqual("hey\n", process.communicate(timeout=PATIENCE)[0])


class PowerTest(KernelCase):
    @pytest.mark.long
    def test_what_was_synced_outlives_a_power_cut_and_what_was_written_a_shutdown(self) -> None:
        for switch_off, command in ((self.host.cut_power, "echo one > /root/kept; sync"),
                                    (self.host.power_off, "echo two > /root/kept")):  # fmt: skip
            self.host.run(["sh", "-c", command])
            switch_off()
            self.host.start()
            self.host.wait_up()
            self.assertEqual(command.split()[1], self.host.run(["cat", "/root/kept"]).strip())


class SendTest(KernelCase):
    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = Path(folder.name) / "sent"
        self.addCleanup(self.host.run, ["rm", "-f", "/root/sent"])

    def test_a_file_arrives_as_it_is_with_its_holes(self) -> None:
        content = os.urandom(4096)
        with self.file.open("wb") as file:
            file.seek(64 << 20)
            file.write(content)
            file.truncate(128 << 20)
        path = self.host.send(self.file, "/root")
        expected = hashlib.sha256(self.file.read_bytes()).hexdigest()
        self.assertEqual(expected, self.host.run(["sha256sum", path]).split()[0])
        self.assertLess(int(self.host.run(["stat", "--format=%b", path])) * 512, 1 << 20)

    def test_a_file_that_cannot_arrive_is_an_error_with_the_guests_words(self) -> None:
        self.file.write_bytes(os.urandom(1 << 20))
        error = self.assertRaises(CommandFailed, self.host.send, self.file, "/no such folder")
        self.assertIn("/no such folder", str(error))


class CommandTest(KernelCase):
    def test_a_command_that_fails_is_an_error_with_its_words(self) -> None:
        error = self.assertRaises(CommandFailed, self.host.run, ["ls", "/no such folder"])
        self.assertIn("/no such folder", str(error))
