"""BitTorrent: what it does as every method, between hosts in network namespaces, and what is its own, on this one."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar
from unittest import mock

from testtools import TestCase

from drivers.base import Image, Place, Range, Taken
from drivers.digests import draw
from drivers.errors import DriverError
from drivers.transfer import bittorrent, swarm
from drivers.transfer.bittorrent import BittorrentTransfer
from drivers.transfer.contract import Terms
from tests.limits import FileSize
from tests.patience import wait_until
from tests.unit.virtman.scene import folder_for
from tests.userspace.drivers.test_transfer import TransferCase

MIB = 1 << 20
SIZE = 8 * MIB
WHOLE = [Range(0, SIZE)]
PATIENCE = "drivers.transfer.bittorrent.PATIENCE"


class BittorrentTest(TransferCase, TestCase):
    method = "drivers.transfer.bittorrent:BittorrentTransfer"
    programs = ()
    settings: ClassVar[dict[str, int]] = {PATIENCE: 10}


class StepsTest(TestCase):
    def test_peers_are_the_next_in_the_list_and_some_anywhere(self) -> None:
        self.assertEqual([[], [1], [1], [1, 2], [1, 2, 3]], [swarm.steps(count, 1) for count in (1, 2, 3, 4, 6)])
        found = [swarm.steps(60, seed) for seed in range(20)]
        self.assertEqual({(1, 2, 3)}, {tuple(each[:3]) for each in found})
        far = {step for each in found for step in each[3:]}
        self.assertEqual(({5}, True), ({len(set(each)) for each in found}, 4 <= min(far) <= max(far) <= 30))
        self.assertGreater(len(far), 10)


class Source:
    """An image in memory, of which some ranges are lacking."""

    def __init__(self, data: bytes, lacking: Sequence[Range] = ()) -> None:
        self.data, self.kept = bytearray(data), list[Range]()
        self._lacking = lacking

    def lacking(self, image: Image) -> Sequence[Range]:
        return self._lacking

    def get(self, image: Image, ranges: Sequence[Range], file: int) -> None:
        for each in ranges:
            os.write(file, self.data[each.offset : each.offset + each.length])

    def put(self, image: Image, ranges: Sequence[Range], file: int) -> Taken:
        for each in ranges:
            self.data[each.offset : each.offset + each.length] = os.read(file, each.length)
        self.kept += ranges
        return Taken()


class Party:
    """One host of this machine."""

    def __init__(self, root: Path, name: str, source: Source) -> None:
        self.state, self.source = root / name, source
        place = Place(self.state, self.state, address="127.0.0.1", reserve=0)
        self.transfer = BittorrentTransfer(place, source, Image("image", SIZE, draw()))
        self.state.mkdir()

    @property
    def left(self) -> list[Path]:
        """Its folders."""
        return list((self.state / "transfer").glob("*"))


class BittorrentOnOneHostTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.root = folder_for(self)
        self.data = os.urandom(SIZE)
        self.pool = ThreadPoolExecutor()
        self.addCleanup(self.pool.shutdown)
        self.parties: list[Party] = []
        self.sender = self.party("sender", Source(self.data))

    def party(self, name: str, source: Source) -> Party:
        party = Party(self.root, name, source)
        self.addCleanup(party.transfer.stop)
        self.parties.append(party)
        return party

    def receiver(self, name: str, lacking: Sequence[Range] = WHOLE) -> Party:
        return self.party(name, Source(bytes(SIZE), lacking))

    def begin(self, limit: int | None = None) -> list[Future[None]]:
        """What comes of the sender and of each receiver."""
        sender, *receivers = self.parties
        contacts = [sender.transfer.offer(), *(each.transfer.expect() for each in receivers)]
        terms = Terms(os.getpid(), WHOLE, contacts[0], contacts[1:], limit)
        calls = [sender.transfer.send, *(each.transfer.receive for each in receivers)]
        return [self.pool.submit(call, terms) for call in calls]

    def assert_nothing_left(self) -> None:
        for party in self.parties:
            self.assertEqual([], party.left)

    def test_a_sender_that_says_nothing_is_not_waited_for(self) -> None:
        self.enterContext(mock.patch.object(bittorrent, "PATIENCE", 0.5))
        silent = self.enterContext(socket.create_server(("127.0.0.1", 0)))
        transfer = self.receiver("a").transfer
        terms = Terms(1, WHOLE, json.dumps(silent.getsockname()), [transfer.expect()])
        self.assertIn("timed out", str(self.assertRaises(DriverError, transfer.receive, terms)))

    def test_the_sender_sends_each_piece_about_once(self) -> None:
        receivers = [self.receiver(name) for name in "abcd"]
        for done in self.begin():
            done.result()
        for receiver in receivers:
            self.assertTrue(receiver.source.data == self.data)
        self.assertLess(self.sender.transfer.sent_bytes, 2 * SIZE, "a busy machine may seem to stall")
        self.assertGreater(sum(each.transfer.sent_bytes for each in receivers), SIZE)
        for receiver in receivers:
            receiver.transfer.stop()
        self.assert_nothing_left()

    def test_only_what_a_receiver_lacks_travels(self) -> None:
        lacking = [Range(MIB, MIB), Range(5 * MIB, MIB // 2)]
        receiver, has_all = self.receiver("a", lacking), self.receiver("b", [])
        for done in self.begin():
            done.result()
        self.assertEqual(sum(each.length for each in lacking), self.sender.transfer.sent_bytes)
        self.assertEqual(self.sender.transfer.sent_bytes, sum(each.length for each in receiver.source.kept))
        self.assertTrue(receiver.source.data[MIB : 2 * MIB] == self.data[MIB : 2 * MIB])
        self.assertEqual([], has_all.source.kept)

    def test_a_piece_counts_when_the_file_has_it(self) -> None:
        piece = MIB
        job = swarm.Job(str(self.root), 1, 2 * piece, piece, [], 1.0)
        hashes = swarm.sha1(self.data[:piece]) + swarm.sha1(self.data[piece : 2 * piece])
        self.assertEqual(frozenset(), swarm.written(job, [0, 1], hashes))
        job.file.write_bytes(self.data[: piece + 1])
        self.assertEqual({0}, swarm.written(job, [0, 1], hashes))

    def test_no_receiver_gets_more_than_the_limit(self) -> None:
        self.receiver("a")
        self.receiver("b")
        begun = time.monotonic()
        for done in self.begin(limit=4 * MIB):
            done.result()
        self.assertGreater(time.monotonic() - begun, 0.8 * SIZE / (4 * MIB), "libtorrent lets a first burst pass")

    def test_a_full_disk_is_an_error_and_leaves_nothing(self) -> None:
        receiver = self.receiver("a")
        contacts = [self.sender.transfer.offer()]
        size = FileSize(self)
        size.to(MIB)
        contacts.append(receiver.transfer.expect())
        size.lift()
        terms = Terms(1, WHOLE, contacts[0], contacts[1:])
        sent = self.pool.submit(self.sender.transfer.send, terms)
        self.assertRaises(DriverError, receiver.transfer.receive, terms)
        sent.result()
        self.assert_nothing_left()

    def test_a_program_that_dies_is_an_error_and_leaves_nothing(self) -> None:
        receiver = self.receiver("a")
        with mock.patch(PATIENCE, 1.0):
            sent, received = self.begin(limit=MIB)
            wait_until(lambda: receiver.source.kept)
            [program] = [
                int(path.parent.name)
                for path in Path("/proc").glob("[0-9]*/cmdline")
                if b"swarm.py\0send" in path.read_bytes()
                and (path.parent / "stat").read_text().split()[3] == str(os.getpid())
            ]
            os.kill(program, signal.SIGKILL)
            self.assertRaises(DriverError, sent.result)
            self.assertRaises(DriverError, received.result)
        self.assert_nothing_left()

    def test_a_stopped_transfer_begins_no_more_and_ends_without_an_error(self) -> None:
        late, receiver = self.receiver("late"), self.receiver("a")
        late.transfer.stop()
        self.assertRaises(DriverError, late.transfer.expect)
        self.parties.remove(late)
        sent, received = self.begin(limit=MIB)
        wait_until(lambda: receiver.source.kept)
        receiver.transfer.stop()
        received.result()
        sent.result()
        self.assertLess(sum(each.length for each in receiver.source.kept), SIZE)
        self.assert_nothing_left()
