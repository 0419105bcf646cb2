"""Methods of transfer with their real programs: hosts in network namespaces, whose images are plain files."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
from testtools import TestCase

from drivers.base import Image, Place, Range, Taken
from drivers.digests import draw
from drivers.errors import DriverError, NoSpace
from drivers.transfer.contract import Terms
from drivers.transfer.uftp import UftpTransfer
from lab.network import Network
from tests.patience import wait_until
from tests.programs import require, require_root
from tests.unit.virtman.scene import folder_for
from tests.userspace.drivers.transferhosts import DONE, FAILED, FileSource, Host, Job

MIB = 1 << 20
SIZE = 12 * MIB + 4096
RANGES = (Range(0, 5 * MIB), Range(7 * MIB, SIZE - 7 * MIB))
"""All but two of the image's MiB."""
LENGTH = sum(each.length for each in RANGES)
NAMES = ("a", "b", "c")
NOBODY: Mapping[str, str] = {}
LIMIT = 8 * MIB
"""Bytes a second: a busy machine has no trouble with that."""
MARK = b"what was in the image when it left"
ETH_P_ALL = 3  # if_ether.h


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
        self.network = Network(["sender", *NAMES, "d"])
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

    def run_all(self, *absent: str, deceived: Mapping[str, str] = NOBODY, **more: Any) -> dict[str, str]:
        """Let all hosts begin but those that are absent. ``more``: of the terms. Returns what came of each.

        ``deceived``: hosts that are told of another sender.
        """
        contacts = {name: host.contact for name, host in self.hosts.items()}
        terms = Terms(os.getpid(), RANGES, contacts.pop("sender"), list(contacts.values()), LIMIT, self.encrypt)
        terms = replace(terms, **more)
        there = {name: host for name, host in self.hosts.items() if name not in absent}
        for name, host in there.items():
            host.begin(replace(terms, sender=deceived.get(name, terms.sender)))
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

    @pytest.mark.long
    def test_a_receiver_that_dies_in_the_middle_keeps_nobody_up(self) -> None:
        assert isinstance(self, TestCase)
        self.start("sender")
        self.start("a", at=LENGTH // 2, act="kill")
        self.start("b")
        self.start("c")
        self.assertEqual({"sender": DONE, "a": "", "b": DONE, "c": DONE}, self.run_all())
        self.assert_has("b", "c")
        self.assert_nothing_left("a")

    @pytest.mark.long
    def test_a_receiver_that_never_comes_keeps_nobody_up(self) -> None:
        assert isinstance(self, TestCase)
        for name in ("sender", *NAMES):
            self.start(name)
        self.assertEqual({"sender": DONE, "b": DONE, "c": DONE}, self.run_all("a"))
        self.assert_has("b", "c")
        self.assert_nothing_left()

    @pytest.mark.long
    def test_receivers_end_when_the_sender_dies(self) -> None:
        assert isinstance(self, TestCase)
        self.start("sender", at=LENGTH // 2, act="kill")
        self.start("a")
        self.start("b")
        self.assertEqual({"sender": "", "a": FAILED, "b": FAILED}, self.run_all())
        self.assert_nothing_left("sender")

    @pytest.mark.long
    def test_a_sender_ends_at_once_that_is_stopped(self) -> None:
        assert isinstance(self, TestCase)
        self.start("sender", at=LENGTH // 2, act="stop")
        self.start("a")
        self.assertEqual({"sender": DONE, "a": FAILED}, self.run_all())
        self.assert_nothing_left()

    @pytest.mark.long
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


SLOW_MACHINE = {"drivers.transfer.multicast.PATIENCE": 10}
"""A machine that is busy answers late."""


class UdpcastTest(TransferCase, TestCase):
    method = "drivers.transfer.udpcast:UdpcastTransfer"
    programs = ("udp-sender", "udp-receiver")
    settings: ClassVar[dict[str, int]] = {
        **SLOW_MACHINE, "drivers.transfer.udpcast.BATCH": MIB, "drivers.transfer.udpcast.TRIES": 20
    }  # fmt: skip


class UftpTest(TransferCase, TestCase):
    method = "drivers.transfer.uftp:UftpTransfer"
    programs = ("uftp", "uftpd")
    settings: ClassVar[dict[str, int]] = {**SLOW_MACHINE, "drivers.transfer.uftp.FILE": MIB}
    encrypt = True

    def sniffed(self, **more: Any) -> tuple[dict[str, str], bool]:
        """What came of each host, and whether anybody could read the image on its way."""
        self.file.write_bytes((MARK * (SIZE // len(MARK) + 1))[:SIZE])
        read = False
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as wire:  # at the switch
            wire.settimeout(0.2)
            over = threading.Event()

            def listen() -> None:
                nonlocal read
                while not over.is_set():
                    with contextlib.suppress(TimeoutError):
                        read = MARK in wire.recv(2048) or read

            listener = threading.Thread(target=listen)
            listener.start()
            try:
                outcomes = self.run_all(**more)
            finally:
                over.set()
                listener.join()
        return outcomes, read

    def test_nobody_else_can_read_what_is_encrypted(self) -> None:
        for name in ("sender", "a"):
            self.start(name)
        self.assertEqual(({"sender": DONE, "a": DONE}, False), self.sniffed())
        self.assert_has("a")

    def test_anybody_can_read_what_is_not(self) -> None:
        self.encrypt = False
        for name in ("sender", "a"):
            self.start(name)
        self.assertEqual(({"sender": DONE, "a": DONE}, True), self.sniffed())
        self.assert_has("a")

    def test_hosts_that_are_not_named_or_have_another_key_get_nothing(self) -> None:
        for name in ("sender", *NAMES, "d"):
            self.start(name)
        contacts = {name: host.contact for name, host in self.hosts.items()}
        key_of_b = contacts["b"].rpartition("|")[2]
        wrong = {name: f"{contacts[name].rpartition('|')[0]}|{key_of_b}" for name in ("sender", "c")}
        outcomes = self.run_all(receivers=[contacts["a"], wrong["c"], contacts["d"]], deceived={"d": wrong["sender"]})
        self.assertEqual({"sender": DONE, "a": DONE, "b": FAILED, "c": FAILED, "d": FAILED}, outcomes)
        self.assert_has("a")
        for name in ("b", "c", "d"):
            self.assertFalse(any((self.root / name / "file").read_bytes()), name)

    def test_a_sender_goes_on_after_uftp_has_crashed(self) -> None:
        program, crashed = self.root / "uftp", self.root / "crashed"
        real = shutil.which("uftp")
        program.write_text(f'#!/bin/sh\n[ -e {crashed} ] || {{ touch {crashed}; kill -SEGV $$; }}\nexec {real} "$@"\n')
        program.chmod(0o755)
        with mock.patch.dict(os.environ, PATH=f"{self.root}:{os.environ['PATH']}"):
            self.start("sender")
        self.start("a")
        self.assertEqual({"sender": DONE, "a": DONE}, self.run_all())
        self.assertTrue(crashed.exists())
        self.assert_has("a")
        self.assert_nothing_left()

    def test_a_sender_without_receivers_sends_to_nobody(self) -> None:
        self.start("sender")
        self.assertEqual({"sender": FAILED}, self.run_all(receivers=[]))
        self.assert_nothing_left()

    def test_nothing_is_left_of_a_host_that_gets_ready_after_it_was_stopped(self) -> None:
        image = Image("image", SIZE, draw())
        transfer = UftpTransfer(Place(self.root, self.root, address="192.0.2.1"), FileSource(self.file), image)
        transfer.stop()
        with contextlib.suppress(DriverError):
            transfer.expect()
        self.assertEqual([], list((self.root / "transfer").iterdir()))


class SlowSource:
    """Takes nothing until ``ended`` says so."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        self._ended = ended

    def lacking(self, image: Image) -> Sequence[Range]:
        return [Range(0, image.size)]

    def put(self, image: Image, ranges: Sequence[Range], file: int) -> Taken:
        wait_until(self._ended, "what comes has ended")
        return Taken()

    def get(self, image: Image, ranges: Sequence[Range], file: int) -> None:
        raise AssertionError("there is no room for it")


class UftpDiskTest(TestCase):
    """What uftpd may take of the disk."""

    def setUp(self) -> None:
        super().setUp()
        require(self, "uftp_keymgt")
        self.root = folder_for(self)

    def transfer(self, source: SlowSource, reserve: int = 0) -> UftpTransfer:
        place = Place(self.root, self.root, address="127.0.0.1", reserve=reserve)
        transfer = UftpTransfer(place, source, Image("image", SIZE, draw()))
        self.addCleanup(transfer.stop)
        return transfer

    def test_the_reserve_of_the_disk_is_left(self) -> None:
        require(self, "uftpd")
        for role in ("send", "receive"):
            transfer = self.transfer(SlowSource(lambda: True), reserve=1 << 60)
            contact = transfer.offer() if role == "send" else transfer.expect()
            terms = Terms(os.getpid(), [Range(0, SIZE)], contact, [contact])
            self.assertIn("no room", str(self.assertRaises(NoSpace, getattr(transfer, role), terms)))
            self.assertEqual([], list((self.root / "transfer").iterdir()))

    def test_who_is_too_slow_ends_also_while_the_source_takes_a_file(self) -> None:
        program, pid = self.root / "uftpd", self.root / "pid"
        program.write_text(COMES_AT_ONCE.format(pid=pid))
        program.chmod(0o755)
        transfer = self.transfer(SlowSource(lambda: not Path("/proc", pid.read_text().strip()).exists()))
        terms = Terms(os.getpid(), [Range(0, SIZE)], transfer.expect(), [])
        with (
            mock.patch("drivers.transfer.uftp.FILE", 64 << 10),
            mock.patch.dict(os.environ, PATH=f"{self.root}:{os.environ['PATH']}"),
        ):
            error = self.assertRaises(DriverError, transfer.receive, terms)
        self.assertEqual("this host is too slow for what comes", str(error))


COMES_AT_ONCE = """#!/bin/sh
echo $$ > {pid}
while [ "$1" != -D ]; do shift; done
for number in 0 1 2 3 4 5 6 7 8 9; do echo > "$2/$number"; done
exec tail -f /dev/null
"""
