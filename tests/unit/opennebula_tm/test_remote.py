"""Steps on hosts, by a stand-in for ssh that runs them here."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import testtools

from opennebula_tm.driver.errors import HostFailed
from opennebula_tm.driver.remote import Hosts
from opennebula_tm.driver.settings import Settings

AWKWARD = "a 'quoted' \"name\"; $(reboot) `x` \\ \n* ü"


class HostsTest(testtools.TestCase):
    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.addCleanup(self._restore, os.environ.get("SSH"))
        self.virtman = self.program("virtman", 'printf "%s\\n" "$@"')

    @staticmethod
    def _restore(ssh: str | None) -> None:
        os.environ.pop("SSH", None)
        if ssh is not None:
            os.environ["SSH"] = ssh

    def program(self, name: str, script: str) -> str:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    def hosts(self, ssh: str = 'exec sh -c "$2"', **settings: float) -> Hosts:
        os.environ["SSH"] = self.program("ssh", ssh)
        return Hosts(Settings(virtman=self.virtman, **settings))  # type: ignore[arg-type]

    def failure(self, ssh: str, **settings: float) -> str:
        return str(self.assertRaises(HostFailed, self.hosts(ssh, **settings).run, "node1", "status"))

    def test_arguments_arrive_as_they_are(self) -> None:
        self.program("virtman", 'printf "%s" "$2"')
        lock = str(self.folder / "lock")
        self.assertEqual(AWKWARD, self.hosts().run("node1", "send", lock, "key", AWKWARD))

    def test_the_first_line_that_means_something_is_the_reason(self) -> None:
        said = "sent 3 MiB (off)\\nmux_client_request_session: x\\nvirtman: it is  full\\nvirtman: the stream was cut"
        self.assertEqual("node1: it is full", self.failure(f"printf '{said}\\n' >&2; exit 1"))

    def test_a_broken_pipe_is_the_reason_if_nothing_else_is(self) -> None:
        broken = "virtman: writing the stream: Broken pipe"
        self.assertEqual("node1: it is full", self.failure(f"printf '{broken}\nvirtman: it is full\n' >&2; exit 1"))
        self.assertEqual("node1: writing the stream: Broken pipe", self.failure(f"echo '{broken}' >&2; exit 1"))

    def test_without_a_word_the_code_is_told(self) -> None:
        self.assertEqual("node1: exit code 7 without a word", self.failure("exit 7"))
        self.assertEqual("node1: ssh ended without a word", self.failure("exit 255"))

    def test_a_step_that_takes_too_long_is_ended_with_all_that_it_runs(self) -> None:
        fifo = self.folder / "alive"
        os.mkfifo(fifo)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        said = self.failure(f'exec 3>"{fifo}"; sleep 600 & wait', step=0.3)
        self.assertEqual("node1: no answer within 0.3 seconds", said)
        os.set_blocking(reader, True)
        self.assertEqual(b"", os.read(reader, 1))  # nobody holds the other end any more

    def test_ssh_that_cannot_be_run_is_told(self) -> None:
        hosts = self.hosts()
        os.environ["SSH"] = "/nonexistent/ssh"
        error = self.assertRaises(HostFailed, hosts.run, "node1", "status")
        self.assertIn("cannot run /nonexistent/ssh", str(error))

    def test_a_host_without_virtman_says_so(self) -> None:
        self.virtman = "/nonexistent/virtman"
        error = self.assertRaises(HostFailed, self.hosts().run, "node1", "status")
        self.assertIn("virtman is not installed there", str(error))

    def test_a_second_action_with_a_disk_waits_for_the_first_and_gives_up_in_time(self) -> None:
        import fcntl

        lock = self.folder / "42-0.lock"
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            error = self.assertRaises(
                HostFailed, self.hosts(lock=1.0).run, "node1", "send", str(self.folder), "42-0", "name"
            )
        self.assertEqual("node1: an earlier action with it still goes on there, after 1 seconds", str(error))
        self.assertEqual("send\nname\n", self.hosts().run("node1", "send", str(self.folder), "42-0", "name"))

    def test_the_longest_reason_is_cut(self) -> None:
        self.assertEqual(len("node1: ") + 400, len(self.failure("head -c 5000 /dev/zero | tr '\\0' x >&2; exit 1")))
