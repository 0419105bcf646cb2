"""Steps on hosts, by a stand-in for ssh that runs them here."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import testtools

from opennebula_tm.driver.errors import HostFailed
from opennebula_tm.driver.remote import Hosts
from opennebula_tm.driver.settings import Settings
from tests.patience import PATIENCE
from tests.unit.opennebula_tm.scene import write
from tests.unit.virtman.scene import folder_for

ROOT = Path(__file__).parents[3]
AWKWARD = "a 'quoted' \"name\"; $(reboot) `x` \\ \n* ü"


class HostsTest(testtools.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.virtman = self.program("virtman", 'printf "%s\\n" "$@"')

    def program(self, name: str, script: str) -> str:
        write(self.folder / name, f"#!/bin/sh\n{script}\n", 0o755)
        return str(self.folder / name)

    def hosts(self, ssh: str = 'exec sh -c "$2"', **settings: Any) -> Hosts:
        self.enterContext(mock.patch.dict(os.environ, SSH=self.program("ssh", ssh)))
        return Hosts(Settings(**{"virtman": self.virtman, **settings}))

    def failure(self, ssh: str, **settings: Any) -> str:
        return str(self.assertRaises(HostFailed, self.hosts(ssh, **settings).run, "node1", "status"))

    def test_arguments_arrive_as_they_are(self) -> None:
        self.program("virtman", 'printf "%s" "$2"')
        lock = str(self.folder / "lock")
        self.assertEqual(AWKWARD, self.hosts().run("node1", "send", lock, "key", AWKWARD))

    def test_the_first_line_that_means_something_is_the_reason(self) -> None:
        for noise in (
            "sent 3 MiB (off)", "sending x", "mux_client_request_session: x", "ControlSocket /x already exists",
            "Warning: Permanently added 'x'", "virtman: warning: x", " ",
        ):  # fmt: skip
            said = self.program("said", f"cat >&2 <<'E'\n{noise}\nvirtman: it is  full\nvirtman: the stream was cut\nE")
            self.assertEqual("node1: it is full", self.failure(f"{said}; exit 1"), noise)

    def test_a_step_that_takes_too_long_is_ended_with_all_that_it_runs(self) -> None:
        fifo = self.folder / "alive"
        os.mkfifo(fifo)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        said = self.failure(f'exec 3>"{fifo}"; sleep {10 * PATIENCE} & wait', step=0.3)
        self.assertEqual("node1: no answer within 0.3 seconds", said)
        self.assertEqual([reader], select.select([reader], [], [], PATIENCE)[0], "a process holds the other end")

    def test_a_transfer_may_take_longer_than_a_step(self) -> None:
        hosts = self.hosts("read -r line && echo $line", step=0.01)
        read, write = os.pipe()
        with os.fdopen(read, "rb") as stdin, os.fdopen(write, "wb") as other_end:
            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(hosts.transfer, "node1", "status", stdin=stdin)
                self.assertRaises(TimeoutError, done.result, 0.05)
                other_end.write(b"data\n")
                other_end.flush()
            self.assertEqual("data\n", done.result())
        error = self.assertRaises(HostFailed, self.hosts("sleep 60", transfer=0.01).transfer, "node1", "status")
        self.assertIn("no answer within 0.01 seconds", str(error))

    def receive(self, target: str | Path, ssh: str, **settings: Any) -> None:
        """Have what ssh prints written to a file."""
        with Path(target).open("wb") as file:
            self.hosts(ssh, **settings).transfer("node1", "send", stdout=file)

    def test_what_a_host_sends_is_written_whole_or_not_at_all(self) -> None:
        target = self.folder / "stream"
        self.receive(target, "printf content; echo sent 7 >&2")
        self.assertEqual("content", target.read_text())
        # A host that has done its part, and a disk that is full.
        for ssh in ("printf content", "exec cat /dev/zero"):
            self.assertRaises(OSError, self.receive, "/dev/full", ssh)
        for end, patience, said in (
            ("echo virtman: it broke >&2; exit 1", PATIENCE, "it broke"),
            ("sleep 600", 0.3, "no answer within 0.3 seconds"),
        ):
            error = self.assertRaises(HostFailed, self.receive, target, f"printf con; {end}", transfer=patience)
            self.assertEqual(f"node1: {said}", str(error))

    def test_only_a_transfer_between_hosts_takes_the_keys_along_and_before_the_users_options(self) -> None:
        own, shows = "-o ControlMaster=auto node1 ", 'while [ $# -gt 1 ]; do printf "%s " "$1"; shift; done'
        hosts = self.hosts(shows, ssh_options=("-o", "ControlMaster=auto"))
        self.assertEqual([own, own], [hosts.run("node1", "status"), hosts.transfer("node1", "status")])
        keys = "-o ForwardAgent=yes -o ControlMaster=no -o ControlPath=none "
        self.assertEqual(keys + own, hosts.transfer("node1", "status", forwarded=True))

    def test_a_step_reads_nothing_of_what_the_driver_is_given(self) -> None:
        code = (
            "from opennebula_tm.driver.remote import Hosts; from opennebula_tm.driver.settings import Settings;"
            "print(repr(Hosts(Settings()).run('node1', 'status')), input())"
        )
        environment = {**os.environ, "SSH": self.program("ssh", "cat"), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], input="request\n", env=environment, capture_output=True, text=True, check=True
        )
        self.assertEqual("'' request\n", done.stdout)

    def test_a_host_without_virtman_says_so(self) -> None:
        self.virtman = "/nonexistent/virtman"
        error = self.assertRaises(HostFailed, self.hosts().run, "node1", "status")
        self.assertIn("virtman is not installed there", str(error))

    def test_a_second_action_with_a_disk_waits_for_the_first_and_gives_up_in_time(self) -> None:
        lock = self.folder / "42-0.lock"
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            error = self.assertRaises(
                HostFailed, self.hosts(lock=1.0).run, "node1", "send", str(self.folder), "42-0", "name"
            )
        self.assertEqual("node1: an earlier action with it still goes on there, after 1 seconds", str(error))
        self.assertEqual("send\nname\n", self.hosts().run("node1", "send", str(self.folder), "42-0", "name"))
