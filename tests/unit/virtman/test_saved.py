"""VMs whose memory the hypervisor has saved: their disks stay as they are until the memory is used or thrown away."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from testtools import TestCase

from tests.unit.virtman.scene import Scene
from virtman.errors import VmSaved
from virtman.records import RECEIVE, REVERT, TAKE, Boot

MIB = 1 << 20
BOOT = Boot(memory=64, cpus=1, network="none")


class SavedTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(self)
        self.scene.volt.offer("debian", size=MIB)
        for disk in ("data", "more"):
            self.scene.vms.create(disk, "debian", None)
        for vm in ("vm", "plain"):
            self.scene.vms.boot(vm, "debian", None, BOOT, [], None)
        self.scene.attachments.attach("vm", "data")
        for disk in ("vm", "data"):
            self.scene.disks.take(disk, "first")
        self.stream: list[bytes] = []
        self.send("first")
        self.scene.disks.take("vm", "second")
        for vm in ("vm", "plain"):
            self.scene.machines.save(vm)

    def send(self, snapshot: str | None) -> None:
        self.scene.streams.send("vm", snapshot, None, self.stream.append, lambda _step, _done, _total: None)

    def test_what_needs_it_on_or_off_is_refused_and_nothing_changes(self) -> None:
        scene, before = self.scene, self.scene.vms.records()
        calls: list[Callable[[], object]] = [
            lambda: scene.disks.clone("vm", ["clone"]),
            lambda: self.send(None),
            lambda: scene.renames.rename("vm", "new"),
            lambda: scene.attachments.attach("vm", "more"),
            lambda: scene.attachments.detach("vm", "data"),
            lambda: scene.migrations.traveller("plain"),
        ]
        for disk in ("vm", "data"):
            calls += [
                partial(scene.disks.resize, disk, 2 * MIB),
                partial(scene.disks.take, disk, "third"),
                partial(scene.disks.revert, disk, "first"),
                partial(scene.disks.drop, disk, "first"),
            ]
        for call in calls:
            self.assertRaises(VmSaved, call)
            self.assertEqual(before, scene.vms.records())
        for vm in ("vm", "plain"):
            scene.vms.start(vm)
        scene.check(self)

    def test_what_was_kept_before_may_be_sent(self) -> None:
        sent = len(self.stream)
        self.send("first")
        self.assertEqual(2 * sent, len(self.stream))

    def test_what_did_not_end_waits_for_its_memory_and_ends_then(self) -> None:
        record, disk = self.scene.vms.record("vm"), self.scene.host.disks["vm"]
        disk.writes = "what the guest wrote"
        for operation in (record.begin(TAKE, point="third", temporary=False), record.begin(REVERT, point="first")):
            self.scene.vm_shelf.put("vm", operation)
            self.assertRaises(VmSaved, self.scene.vms.repair, "vm")
            self.assertEqual(operation, self.scene.vms.record("vm"))
            self.scene.vms.start("vm")
            self.assertEqual((True, "what the guest wrote"), (self.scene.vms.record("vm").steady, disk.writes))
            self.scene.machines.save("vm")
        self.scene.vm_shelf.put("vm", record.begin(RECEIVE, base="first", points=[]))
        self.assertRaises(VmSaved, self.scene.vms.repair, "vm")
        self.assertEqual("what the guest wrote", disk.writes)

    def test_all_of_it_is_destroyed(self) -> None:
        for vm in ("vm", "plain"):
            self.scene.vms.destroy(vm)
        self.assertEqual({}, self.scene.machines.saved)
        self.scene.check(self)
