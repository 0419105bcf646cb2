"""Sending and receiving over doubles: what goes where, what is refused, and what a failure leaves."""

from __future__ import annotations

import errno
import io
import os
from unittest import mock

from testtools import TestCase

from drivers.base import Device, Range
from drivers.blocks import open_blocks
from drivers.errors import HostFailed
from tests.doubles.drivers import SnapshotDouble
from tests.doubles.volt import digest_of
from tests.unit.virtman.scene import BOOT, MIB, Scene, folder_for
from tests.unit.virtman.test_cut_off import CutOff
from virtman import booting, creating, disks, streams
from virtman.client import silently
from virtman.errors import (
    BadRequest,
    BadStream,
    CallerGone,
    Conflict,
    NoRoom,
    UnknownSnapshot,
    VmExists,
    VmRuns,
    VmSaved,
)
from virtman.stream import MOST_DATA, Data, Header, Reader, Zeros, write
from virtman.streams import pieces


def sent(scene: Scene, snapshot: str | None = None, since: str | None = None, *, all_of_them: bool = False) -> bytes:
    target = io.BytesIO()
    streams.send(scene.vms, "vm", snapshot, since, target.write, silently, with_snapshots=all_of_them)  # type: ignore[arg-type]
    return target.getvalue()


def receive(scene: Scene, stream: bytes, vm: str = "vm", image: str = "debian") -> None:
    streams.receive(scene.vms, vm, image, [stream[at : at + 100] for at in range(0, len(stream), 100)], silently)


def header_of(stream: bytes) -> Header:
    return Reader([stream]).header


def forged(stream: bytes, image: str | None = None, sizes: dict[str | None, int] | None = None) -> bytes:
    """The same stream, of another image, or with other sizes of sections."""
    reader = Reader([stream])
    contents, header = [list(found) for _section, found in reader.sections()], reader.header
    sections = tuple(
        section.model_copy(update={"size": (sizes or {}).get(section.name, section.size)})
        for section in header.sections
    )
    return b"".join(write(header.model_copy(update={"image": image or header.image, "sections": sections}), contents))


def sender(test: TestCase) -> Scene:
    """A host with a VM that has the snapshots a, b after it, c after a, and has gone on from c. At b it is larger."""
    scene = Scene(test)
    scene.volt.offer("debian", size=MIB)
    creating.create(scene.vms, "vm", "debian", None)
    for name in ("a", "b"):
        scene.host.disks["vm"].writes = f"at {name}"
        disks.take(scene.vms, "vm", name)
        disks.resize(scene.vms, "vm", 2 * MIB)  # for the next one
    disks.revert(scene.vms, "vm", "a")
    scene.host.disks["vm"].writes = "at c"
    disks.take(scene.vms, "vm", "c")
    scene.host.disks["vm"].writes = "now"
    return scene


def receiver(scene: Scene) -> None:
    scene.volt.offer("debian", size=MIB)


class StreamsTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.source = sender(self)
        self.target = Scene(self)
        receiver(self.target)

    def writes(self) -> str:
        return self.target.host.disks["vm"].writes


class SendTest(StreamsTest):
    def names(self, stream: bytes) -> list[str | None]:
        return [section.name for section in header_of(stream).sections]

    def test_what_is_asked_for_is_sent(self) -> None:
        asked: list[tuple[tuple[str | None, str | None, bool], list[str | None]]] = [
            ((None, None, False), [None]),
            ((None, None, True), ["a", "b", "c", None]),
            (("b", None, False), ["b"]),
            (("b", None, True), ["a", "b"]),
            (("c", "a", True), ["c"]),
            ((None, "a", True), ["c", None]),
            ((None, "a", False), [None]),
            ((None, "c", False), [None]),
        ]
        for (snapshot, since, all_of_them), names in asked:
            stream = sent(self.source, snapshot, since, all_of_them=all_of_them)
            self.assertEqual(names, self.names(stream))
            base = self.source.vms.record("vm").snapshot(since or "none")
            self.assertEqual(base and base.id, header_of(stream).since)

    def test_a_receiver_is_told_how_much_takes_room(self) -> None:
        changed = [Range(0, 512), Range(512, MIB // 2, zeros=True)]
        with mock.patch.object(SnapshotDouble, "changes", return_value=changed):
            header = header_of(sent(self.source))
        self.assertEqual((512 + MIB // 2, 512), (header.total, header.data))

    def test_what_did_not_come_before_is_refused(self) -> None:
        for snapshot, since in (("c", "b"), ("a", "a"), ("a", "c"), (None, "b")):  # type: tuple[str | None, str]
            for all_of_them in (False, True):
                self.assertRaises(BadRequest, sent, self.source, snapshot, since, all_of_them=all_of_them)
        self.assertRaises(UnknownSnapshot, sent, self.source, "d")
        self.assertRaises(UnknownSnapshot, sent, self.source, None, "d")

    def test_a_snapshot_that_is_replaced_before_it_is_read_is_not_sent(self) -> None:
        for since, gone in ((None, "c"), ("a", "a")):
            self.replace_at_each_comparison(gone)
            target = io.BytesIO()
            error = self.assertRaises(
                BadRequest, streams.send, self.source.vms, "vm", "c", since, target.write, silently,
                with_snapshots=True,
            )  # fmt: skip
            self.assertIn(f"snapshot '{gone}' of vm 'vm' was deleted", str(error))
            self.assertEqual(b"", target.getvalue())

    def replace_at_each_comparison(self, gone: str) -> None:
        """Have somebody replace a snapshot of the sender each time that one is compared with another state."""
        vms = self.source.vms

        class Replacing(SnapshotDouble):
            def changes(self, vm: str, snapshot: str | None, since: str | None) -> list[Range]:
                disks.drop(vms, "vm", gone)
                disks.take(vms, "vm", gone)
                return super().changes(vm, snapshot, since)

        vms.vmdisks = Replacing(self.source.host)

    def test_the_image_stays_meanwhile(self) -> None:
        def write(_data: bytes) -> None:
            self.assertTrue("debian" in self.source.stacks._kept)

        streams.send(self.source.vms, "vm", None, None, write, silently)
        self.assertFalse("debian" in self.source.stacks._kept)

    def test_who_does_not_listen_any_more_ends_it(self) -> None:
        def write(_data: bytes) -> None:
            raise CallerGone("hung up")

        self.assertRaises(CallerGone, streams.send, self.source.vms, "vm", None, None, write, silently)
        self.source.check(self)
        self.assertEqual({"a", "b", "c"}, set(self.source.host.disks["vm"].snapshots))


class PiecesTest(TestCase):
    def pieces(self, content: bytes, *ranges: Range) -> list[Data | Zeros]:
        path = folder_for(self) / "disk"
        path.write_bytes(content)
        with open_blocks("vm", Device(len(content), path)) as blocks:
            return list(pieces(blocks, ranges))

    def test_zeros_that_were_written_are_not_sent_one_by_one(self) -> None:
        content = bytes(MOST_DATA) + b"x" * 1024 + bytes(MOST_DATA)
        found = self.pieces(content, Range(0, MOST_DATA + 1024), Range(MOST_DATA + 1024, 512))
        expected = [Zeros(0, MOST_DATA), Data(MOST_DATA, b"x" * 1024), Zeros(MOST_DATA + 1024, 512)]
        self.assertEqual(expected, found)

    def test_ranges_of_zeros_are_not_read(self) -> None:
        self.assertEqual([Zeros(512, 3 * MOST_DATA)], self.pieces(b"", Range(512, 3 * MOST_DATA, zeros=True)))


class ReceiveTest(StreamsTest):
    def test_a_disk_whose_image_is_withdrawn_still_moves(self) -> None:
        self.target.volt.remove_image("debian", when_unused=True)
        receive(self.target, sent(self.source))
        self.assertEqual("now", self.writes())

    def test_a_tree(self) -> None:
        receive(self.target, sent(self.source, all_of_them=True))
        self.target.check(self)
        record, source = self.target.vms.record("vm"), self.source.vms.record("vm")
        self.assertEqual(
            (source.snapshots, source.current, source.size), (record.snapshots, record.current, record.size)
        )
        self.assertEqual(self.source.host.disks["vm"].snapshots, self.target.host.disks["vm"].snapshots)
        self.assertEqual("now", self.writes())

    def test_a_tree_whose_root_is_gone(self) -> None:
        disks.drop(self.source.vms, "vm", "a")
        receive(self.target, sent(self.source, all_of_them=True))
        record, source = self.target.vms.record("vm"), self.source.vms.record("vm")
        self.assertEqual(({None}, source.snapshots), ({each.parent for each in record.snapshots}, record.snapshots))
        self.assertEqual(self.source.host.disks["vm"].snapshots, self.target.host.disks["vm"].snapshots)

    def test_a_snapshot_alone_is_where_the_disk_is(self) -> None:
        receive(self.target, sent(self.source, "b"))
        record = self.target.vms.record("vm")
        self.assertEqual(("at b", "b"), (self.writes(), record.current))
        self.assertEqual([("b", None)], [(snapshot.name, snapshot.parent) for snapshot in record.snapshots])
        self.target.check(self)

    def test_what_changed_since(self) -> None:
        receive(self.target, sent(self.source, "a"))
        receive(self.target, sent(self.source, None, "a", all_of_them=True))
        record = self.target.vms.record("vm")
        self.assertEqual(["a", "c"], [snapshot.name for snapshot in record.snapshots])
        self.assertEqual(("now", "c", MIB), (self.writes(), record.current, record.size))
        self.target.check(self)

    def test_it_is_refused_where_it_does_not_fit(self) -> None:
        changes = sent(self.source, None, "a", all_of_them=True)
        receive(self.target, sent(self.source, "a"))
        self.target.volt.offer("other", size=MIB)
        said = str(self.assertRaises(Conflict, receive, self.target, changes, "vm", "other"))
        self.assertIn("vm 'vm' is of image 'debian'", said)
        creating.create(self.target.vms, "no-a", "debian", None)
        self.assertRaises(Conflict, receive, self.target, changes, "no-a")
        self.target.host.disks["vm"].writes = "changed"
        self.assertRaises(Conflict, receive, self.target, changes)
        disks.revert(self.target.vms, "vm", "a")
        disks.take(self.target.vms, "vm", "c")
        disks.revert(self.target.vms, "vm", "a")
        self.assertIn("has a snapshot 'c'", str(self.assertRaises(Conflict, receive, self.target, changes)))
        disks.drop(self.target.vms, "vm", "c")
        receive(self.target, changes)
        self.assertRaises(Conflict, receive, self.target, changes)
        self.target.check(self)

    def test_a_disk_that_went_on_or_grew_is_left_alone(self) -> None:
        receive(self.target, sent(self.source, "a"))
        changes = sent(self.source, None, "a", all_of_them=True)
        for change in (
            lambda: disks.take(self.target.vms, "vm", "d"),
            lambda: disks.resize(self.target.vms, "vm", 2 * MIB),
        ):
            change()
            before = self.target.vms.record("vm")
            self.assertIn("has changed since", str(self.assertRaises(Conflict, receive, self.target, changes)))
            self.assertEqual(before, self.target.vms.record("vm"))
            disks.revert(self.target.vms, "vm", "a")
        receive(self.target, changes)

    def test_of_another_image(self) -> None:
        self.target.volt.offer("other", size=MIB)
        self.assertRaises(Conflict, receive, self.target, sent(self.source), "vm", "other")
        self.assertEqual({}, self.target.host.disks)
        self.target.check(self)

    def test_changes_over_another_image_of_the_same_name(self) -> None:
        receive(self.target, sent(self.source, "a"))
        before = self.target.vms.record("vm")
        changes = forged(sent(self.source, None, "a"), image=digest_of("other"))
        said = str(self.assertRaises(Conflict, receive, self.target, changes))
        self.assertIn("of another image", said)
        self.assertEqual((before, "at a"), (self.target.vms.record("vm"), self.writes()))

    def test_a_section_that_is_smaller_than_what_it_is_over(self) -> None:
        whole = sent(self.source, all_of_them=True)
        self.assertRaises(Conflict, receive, self.target, forged(whole, sizes={"a": 2 * MIB}))
        self.assertEqual({}, self.target.host.disks)
        receive(self.target, sent(self.source, "a"))
        changes = sent(self.source, None, "a")
        self.assertRaises(Conflict, receive, self.target, forged(changes, sizes={None: MIB // 2}))
        self.assertEqual("at a", self.writes())
        self.target.check(self)

    def test_a_vm_that_runs_is_left_alone(self) -> None:
        receive(self.target, sent(self.source, "a"))
        booting.boot(self.target.vms, "vm", "debian", None, BOOT, [], None)
        self.assertRaises(VmRuns, receive, self.target, sent(self.source, None, "a"))
        self.target.machines.save("vm")
        self.assertRaises(VmSaved, receive, self.target, sent(self.source, None, "a"))
        self.target.machines.stop("vm", force=True)
        receive(self.target, sent(self.source, None, "a", all_of_them=True))
        begins_with = self.target.machines.defined["vm"].node
        self.assertEqual(self.target.vms.vmdisks.open("vm").node, begins_with)

    def test_a_failure_leaves_all_as_it_was(self) -> None:
        receive(self.target, sent(self.source, "a"))
        changes = sent(self.source, None, "a", all_of_them=True)
        before = self.target.vms.record("vm")
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for call, failure, error in (
            ("blocks.write", full, NoRoom),
            ("blocks.flush", full, NoRoom),
            ("snapshot.take", HostFailed(full), HostFailed),
        ):
            self.target.host.failing[call] = failure
            self.assertRaises(error, receive, self.target, changes)
            self.target.host.failing.clear()
            self.assertEqual((before, "at a"), (self.target.vms.record("vm"), self.writes()))
            self.target.check(self)
        for length in range(0, len(changes), 400):
            self.assertRaises(BadStream, receive, self.target, changes[:length])
            self.assertEqual((before, "at a"), (self.target.vms.record("vm"), self.writes()))
        receive(self.target, changes)

    def test_a_new_vm_that_fails_leaves_nothing(self) -> None:
        stream = sent(self.source, all_of_them=True)
        self.target.host.failing["blocks.write"] = OSError(errno.ENOSPC, "full")
        self.assertRaises(NoRoom, receive, self.target, stream)
        self.target.host.failing.clear()
        for length in range(0, len(stream), 400):
            self.assertRaises(BadStream, receive, self.target, stream[:length])
        self.assertEqual({}, self.target.host.disks)
        self.target.check(self)

    def test_what_is_kept_for_vms_that_write_is_not_taken(self) -> None:
        stream = sent(self.source, all_of_them=True)
        for spare in ([0], [MIB, 0]):  # before anything is written, and when it runs out
            with mock.patch.object(SnapshotDouble, "spare", side_effect=spare):
                self.assertRaises(NoRoom, receive, self.target, stream)
            self.assertEqual({}, self.target.host.disks)
            self.target.check(self)

    def test_a_whole_vm_is_received_once(self) -> None:
        stream = sent(self.source)
        receive(self.target, stream)
        self.target.host.disks["vm"].writes = "went on"
        self.assertRaises(VmExists, receive, self.target, stream)
        self.assertEqual("went on", self.writes())


class ReceiveCutOffTest(CutOff):
    def setUp(self) -> None:
        super().setUp()
        source = sender(self)
        self.whole, self.first = sent(source, all_of_them=True), sent(source, "a")
        self.changes = sent(source, None, "a", all_of_them=True)

    def test_a_new_vm_is_there_whole_or_not_at_all(self) -> None:
        def whole_or_nothing(scene: Scene) -> None:
            if scene.vms.records.get("vm") is None:
                receive(scene, self.whole)
            self.assertEqual("now", scene.host.disks["vm"].writes)
            self.assertEqual({"a", "b", "c"}, set(scene.host.disks["vm"].snapshots))
            scene.check(self)

        moments = self.cut_everywhere(receiver, lambda scene: receive(scene, self.whole), whole_or_nothing)
        self.assertTrue({"receive:written", "receive:kept", "before blocks.write"} <= set(moments), str(moments))

    def test_a_vm_has_all_that_changed_or_nothing(self) -> None:
        def given(scene: Scene) -> None:
            receiver(scene)
            receive(scene, self.first)

        def all_or_nothing(scene: Scene) -> None:
            disk, names = scene.host.disks["vm"], [snapshot.name for snapshot in scene.vms.record("vm").snapshots]
            self.assertIn((disk.writes, names), (("at a", ["a"]), ("now", ["a", "c"])))
            if names == ["a"]:
                receive(scene, self.changes)
            self.assertEqual("now", disk.writes)
            scene.check(self)

        moments = self.cut_everywhere(given, lambda scene: receive(scene, self.changes), all_or_nothing)
        self.assertTrue({"receive:recorded", "receive:kept", "after snapshot.take"} <= set(moments), str(moments))

    def test_sending_leaves_nothing(self) -> None:
        def given(scene: Scene) -> None:
            receiver(scene)
            receive(scene, self.whole)

        def as_before(scene: Scene) -> None:
            self.assertEqual({"a", "b", "c"}, set(scene.host.disks["vm"].snapshots))
            self.assertEqual("now", scene.host.disks["vm"].writes)

        moments = self.cut_everywhere(given, lambda scene: sent(scene, all_of_them=True), as_before)
        self.assertIn("send:section", moments)
