"""Methods of transfer with their real programs: hosts in network namespaces, whose images are plain files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import ClassVar

from testtools import TestCase

from drivers.base import Range
from drivers.transfer.contract import Terms
from lab.network import Network
from tests.programs import require, require_root
from tests.unit.virtman.scene import folder_for
from tests.userspace.drivers.transferhosts import DONE, FAILED, Host, Job

MIB = 1 << 20
SIZE = 12 * MIB + 4096
RANGES = (Range(0, 5 * MIB), Range(7 * MIB, SIZE - 7 * MIB))
"""All but two of the image's MiB."""
LENGTH = sum(each.length for each in RANGES)
NAMES = ("a", "b", "c")


class TransferCase:
    """What every method does: one class for each method derives from this and from TestCase."""

    method: ClassVar[str]
    programs: ClassVar[tuple[str, ...]]
    settings: ClassVar[dict[str, int]] = {}
    encrypt = False
    most_sent = 2 * LENGTH
    """Bytes that the sender's link may carry for all receivers."""

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        assert isinstance(self, TestCase)
        require_root(self, "network namespaces")
        require(self, *self.programs)
        self.root = folder_for(self)
        self.network = Network(["sender", *NAMES])
        self.network.start()
        self.addCleanup(self.network.stop)
        self.file = self.root / "image"
        self.file.write_bytes(os.urandom(SIZE))
        self.hosts: dict[str, Host] = {}

    def start(self, name: str, *, at: int = 0, act: str = "") -> Host:
        """Have a host get ready, and do ``act`` after ``at`` bytes."""
        folder = self.root / name
        folder.mkdir()
        file = folder / "file"
        if name == "sender":
            file.symlink_to(self.file)
        else:
            file.touch()
            os.truncate(file, SIZE)
        role, address = "send" if name == "sender" else "receive", self.network.address(name)
        job = Job(self.method, role, str(folder), address, str(file), at, act, self.settings)
        self.hosts[name] = Host(self.network, name, job)
        assert isinstance(self, TestCase)
        self.addCleanup(self.hosts[name].end)
        return self.hosts[name]

    def run_all(self, *absent: str) -> dict[str, str]:
        """Let all hosts begin but those that are absent. Returns what came of each."""
        sender = self.hosts["sender"].contact
        receivers = [host.contact for name, host in self.hosts.items() if name != "sender"]
        terms = Terms(os.getpid(), RANGES, sender, receivers, encrypt=self.encrypt)
        there = {name: host for name, host in self.hosts.items() if name not in absent}
        for host in there.values():
            host.begin(terms)
        return {name: host.outcome().partition(" ")[0] for name, host in there.items()}

    def assert_has(self, *names: str) -> None:
        """These hosts have all of the ranges, and nothing else."""
        assert isinstance(self, TestCase)
        wanted = bytearray(SIZE)
        content = self.file.read_bytes()
        for each in RANGES:
            end = each.offset + each.length
            wanted[each.offset : end] = content[each.offset : end]
        for name in names:
            self.assertTrue(wanted == (self.root / name / "file").read_bytes(), name)

    def assert_nothing_left(self, *killed: str) -> None:
        """End the hosts: no program runs any more, and only a killed host has files left."""
        assert isinstance(self, TestCase)
        for name, host in self.hosts.items():
            host.end()
            argv = ["ip", "netns", "pids", Path(self.network.inside(name)[-1].partition("=")[2]).name]
            self.assertEqual("", subprocess.run(argv, capture_output=True, text=True, check=True).stdout, name)
            if name not in killed:
                state = self.root / name / "state"
                self.assertEqual([], [path for path in state.rglob("*") if path.is_file()])

    def test_what_is_asked_for_arrives_everywhere_and_crosses_the_senders_link_about_once(self) -> None:
        assert isinstance(self, TestCase)
        for name in ("sender", *NAMES):
            self.start(name)
        before = self.network.sent_bytes("sender")
        self.assertEqual(dict.fromkeys(("sender", *NAMES), DONE), self.run_all())
        self.assertLess(self.network.sent_bytes("sender") - before, self.most_sent)
        self.assert_has(*NAMES)
        self.assert_nothing_left()

    def test_a_receiver_that_dies_in_the_middle_keeps_nobody_up(self) -> None:
        assert isinstance(self, TestCase)
        self.start("sender")
        self.start("a", at=LENGTH // 2, act="kill")
        self.start("b")
        self.start("c")
        self.assertEqual({"sender": DONE, "a": "", "b": DONE, "c": DONE}, self.run_all())
        self.assert_has("b", "c")
        self.assert_nothing_left("a")

    def test_a_receiver_that_never_comes_keeps_nobody_up(self) -> None:
        assert isinstance(self, TestCase)
        for name in ("sender", *NAMES):
            self.start(name)
        self.assertEqual({"sender": DONE, "b": DONE, "c": DONE}, self.run_all("a"))
        self.assert_has("b", "c")
        self.assert_nothing_left()

    def test_receivers_end_when_the_sender_dies(self) -> None:
        assert isinstance(self, TestCase)
        self.start("sender", at=LENGTH // 2, act="kill")
        self.start("a")
        self.start("b")
        self.assertEqual({"sender": "", "a": FAILED, "b": FAILED}, self.run_all())
        self.assert_nothing_left("sender")

    def test_a_sender_ends_at_once_that_is_stopped(self) -> None:
        assert isinstance(self, TestCase)
        self.start("sender", at=LENGTH // 2, act="stop")
        self.start("a")
        self.assertEqual({"sender": DONE, "a": FAILED}, self.run_all())
        self.assert_nothing_left()

    def test_a_receiver_ends_at_once_that_is_stopped(self) -> None:
        assert isinstance(self, TestCase)
        self.start("sender")
        self.start("a", at=LENGTH // 2, act="stop")
        self.start("b")
        self.assertEqual({"sender": DONE, "a": DONE, "b": DONE}, self.run_all())
        self.assert_has("b")
        self.assert_nothing_left()

    def test_nothing_is_left_of_what_never_began(self) -> None:
        self.start("sender")
        self.start("a")
        self.assert_nothing_left()


class UdpcastTest(TransferCase, TestCase):
    method = "drivers.transfer.udpcast:UdpcastTransfer"
    programs = ("udp-sender", "udp-receiver")
    settings: ClassVar[dict[str, int]] = {"drivers.transfer.udpcast.BATCH": MIB}
