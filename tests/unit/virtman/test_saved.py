"""VMs whose memory the hypervisor has saved: their disks stay as they are until the memory is used or thrown away."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from testtools import TestCase

from tests.unit.virtman.scene import BOOT, MIB, Scene
from virtman import attaching, booting, creating, disks, migration, renaming, streams
from virtman.client import silently
from virtman.errors import VmSaved
from virtman.records import RECEIVE, REVERT, TAKE


class SavedTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(self)
        self.scene.volt.offer("debian", size=MIB)
        for disk in ("data", "more"):
            creating.create(self.scene.vms, disk, "debian", None)
        for vm in ("vm", "plain"):
            booting.boot(self.scene.vms, vm, "debian", None, BOOT, [], None)
        attaching.attach(self.scene.vms, "vm", "data")
        for disk in ("vm", "data"):
            disks.take(self.scene.vms, disk, "first")
        self.stream: list[bytes] = []
        self.send("first")
        disks.take(self.scene.vms, "vm", "second")
        for vm in ("vm", "plain"):
            self.scene.machines.save(vm)

    def send(self, snapshot: str | None) -> None:
        streams.send(self.scene.vms, "vm", snapshot, None, self.stream.append, silently)

    def test_after_a_restart_libvirt_restores_a_vm_over_the_disks_that_it_has_then(self) -> None:
        self.scene.machines.with_disks["vm"] = {}
        self.scene.restart()
        self.assertEqual({"data"}, set(self.scene.machines.with_disks["vm"]))

    def test_what_needs_it_on_or_off_is_refused_and_nothing_changes(self) -> None:
        scene, before = self.scene, self.scene.vms.records.all()
        calls: list[Callable[[], object]] = [
            lambda: creating.clone(scene.vms, "vm", ["clone"]),
            lambda: self.send(None),
            lambda: renaming.rename(scene.vms, "vm", "new"),
            lambda: attaching.attach(scene.vms, "vm", "more"),
            lambda: attaching.detach(scene.vms, "vm", "data"),
            lambda: migration.migration_source(scene.vms, "plain"),
        ]
        for disk in ("vm", "data"):
            calls += [
                partial(disks.resize, scene.vms, disk, 2 * MIB),
                partial(disks.take, scene.vms, disk, "third"),
                partial(disks.revert, scene.vms, disk, "first"),
                partial(disks.drop, scene.vms, disk, "first"),
            ]
        for call in calls:
            self.assertRaises(VmSaved, call)
            self.assertEqual(before, scene.vms.records.all())
        for vm in ("vm", "plain"):
            booting.start(scene.vms, vm)
        scene.check(self)

    def test_what_was_kept_before_may_be_sent(self) -> None:
        sent = len(self.stream)
        self.send("first")
        self.assertEqual(2 * sent, len(self.stream))

    def test_what_did_not_end_waits_for_its_memory_and_ends_then(self) -> None:
        record, disk = self.scene.vms.record("vm"), self.scene.host.disks["vm"]
        disk.writes = "what the guest wrote"
        for operation in (
            record.begin(TAKE, snapshot="third", temporary=False),
            record.begin(REVERT, snapshot="first"),
        ):
            self.scene.vm_shelf.put("vm", operation)
            self.assertRaises(VmSaved, disks.repair, self.scene.vms, "vm")
            self.assertEqual(operation, self.scene.vms.record("vm"))
            booting.start(self.scene.vms, "vm")
            self.assertEqual((True, "what the guest wrote"), (self.scene.vms.record("vm").steady, disk.writes))
            self.scene.machines.save("vm")
        self.scene.vm_shelf.put("vm", record.begin(RECEIVE, base="first", snapshots=[]))
        self.assertRaises(VmSaved, disks.repair, self.scene.vms, "vm")
        self.assertEqual("what the guest wrote", disk.writes)

    def test_all_of_it_is_destroyed(self) -> None:
        for vm in ("vm", "plain"):
            creating.destroy(self.scene.vms, vm)
        self.assertEqual({}, self.scene.machines.saved)
        self.scene.check(self)
