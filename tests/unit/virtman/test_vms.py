"""One host's VMs."""

from __future__ import annotations

import threading
from pathlib import Path

from testtools import TestCase

from drivers.errors import DriverError, SnapshotMissing
from tests.unit.virtman.scene import Scene
from virtman.errors import BadSize, CoordinatorDown, HypervisorError, UnknownImage, UnknownVm, VmExists
from virtman.records import Boot, VmPhase, VmRecord

SOON = 10.0
MIB = 1 << 20
TROUBLE = DriverError("the device is on fire")
BOOT = Boot(memory=64, cpus=1, network="none")


class VmsTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(self)
        self.scene.volt.offer("debian", size=MIB)
        self.vms, self.host = self.scene.vms, self.scene.host

    def record(self, name: str = "vm") -> VmRecord:
        record = self.scene.vm_shelf.get(name)
        assert record is not None
        return record


class CreateTest(VmsTest):
    def test_a_disk_has_the_size_of_its_image(self) -> None:
        self.assertEqual(Path("/disks/vm.qcow2"), self.vms.create("vm", "debian", None))
        self.assertEqual(MIB, self.host.disks["vm"].size)
        self.assertEqual(VmRecord(name="vm", image="debian", size=MIB, phase=VmPhase.READY), self.record())

    def test_a_disk_may_be_larger_than_its_image(self) -> None:
        self.vms.create("vm", "debian", 5 * MIB)
        self.assertEqual(5 * MIB, self.host.disks["vm"].size)

    def test_a_disk_is_made_on_the_hosts_own_export(self) -> None:
        record = self.scene.stacks.ensure("debian")
        self.vms.create("vm", "debian", None)
        self.assertEqual(self.scene.drivers.export.local(record.image), self.host.disks["vm"].origin)

    def test_asked_again_it_returns_the_same_disk(self) -> None:
        path = self.vms.create("vm", "debian", None)
        self.host.disks["vm"].writes = "precious"
        for size in (None, MIB):
            self.assertEqual(path, self.vms.create("vm", "debian", size))
        self.assertEqual("precious", self.host.disks["vm"].writes)

    def test_another_image_or_size_is_refused(self) -> None:
        self.scene.volt.offer("alpine", size=MIB)
        self.vms.create("vm", "debian", None)
        for image, size in (("alpine", None), ("debian", 2 * MIB)):
            error = self.assertRaises(VmExists, self.vms.create, "vm", image, size)
            self.assertIn("debian", str(error))
        self.assertEqual(["debian"], [record.image for record in self.vms.records()])

    def test_impossible_sizes_are_refused_before_anything_is_done(self) -> None:
        for size in (0, -512, 1, 513, MIB + 1, (1 << 60) + 512):
            self.assertRaises(BadSize, self.vms.create, "vm", "debian", size)
        self.assertEqual([], self.host.calls)
        self.assertEqual([], self.scene.vm_shelf.names())

    def test_a_disk_smaller_than_its_image_is_refused_and_leaves_nothing_of_the_vm(self) -> None:
        error = self.assertRaises(BadSize, self.vms.create, "vm", "debian", 512)
        self.assertIn(str(MIB), str(error))
        self.scene.stacks.remove_if_idle("debian")
        self.scene.check_empty(self)

    def test_an_unknown_image_leaves_nothing(self) -> None:
        self.assertRaises(UnknownImage, self.vms.create, "vm", "unknown", None)
        self.scene.check_empty(self)

    def test_the_image_of_the_host_needs_no_volt(self) -> None:
        self.vms.create("old", "debian", None)
        self.scene.volt.down = True
        self.vms.create("vm", "debian", None)
        self.scene.check(self)

    def test_a_new_image_needs_volt(self) -> None:
        self.scene.volt.down = True
        self.assertRaises(CoordinatorDown, self.vms.create, "vm", "debian", None)
        self.assertEqual({}, self.host.leftovers())
        self.assertEqual([], self.scene.vm_shelf.names())

    def test_a_snapshot_that_fails_leaves_nothing_of_the_vm(self) -> None:
        self.host.failing = {"snapshot.create": TROUBLE}
        self.assertIs(TROUBLE, self.assertRaises(DriverError, self.vms.create, "vm", "debian", None))
        self.assertEqual({}, self.host.disks)
        self.assertEqual([], self.scene.vm_shelf.names())

    def test_undoing_that_fails_is_finished_by_repair(self) -> None:
        self.host.failing = {"snapshot.create": TROUBLE, "snapshot.delete": DriverError("stuck")}
        self.assertIs(TROUBLE, self.assertRaises(DriverError, self.vms.create, "vm", "debian", None))
        self.assertEqual(VmPhase.CREATING, self.record().phase)
        self.host.failing = {}
        self.vms.repair("vm")
        self.assertEqual([], self.scene.vm_shelf.names())

    def test_many_vms_of_many_images_at_once(self) -> None:
        images = [f"image-{number}" for number in range(5)]
        for image in images:
            self.scene.volt.offer(image)
        threads = [
            threading.Thread(target=self.vms.create, args=(f"{image}-{number}", image, None))
            for number in range(4)
            for image in images
        ]
        for thread in threads:
            self.addCleanup(thread.join, SOON)
            thread.start()
        for thread in threads:
            thread.join(SOON)
        self.assertEqual(20, len(self.host.disks))
        self.assertEqual(5, self.host.calls.count("attach.connect"))
        self.scene.check(self)

    def test_the_same_vm_at_once_is_made_once(self) -> None:
        paths = []
        threads = [
            threading.Thread(target=lambda: paths.append(self.vms.create("vm", "debian", None))) for _ in range(8)
        ]
        for thread in threads:
            self.addCleanup(thread.join, SOON)
            thread.start()
        for thread in threads:
            thread.join(SOON)
        self.assertEqual([Path("/disks/vm.qcow2")] * 8, paths)
        self.assertEqual(1, self.host.calls.count("snapshot.create"))


class DestroyTest(VmsTest):
    def setUp(self) -> None:
        super().setUp()
        self.vms.create("vm", "debian", None)

    def test_the_disk_and_the_record_go(self) -> None:
        self.vms.destroy("vm")
        self.assertEqual({}, self.host.disks)
        self.assertEqual([], self.scene.vm_shelf.names())

    def test_the_stack_stays_for_the_next_vm(self) -> None:
        self.vms.destroy("vm")
        self.assertIn("debian", self.host.served)

    def test_an_unknown_vm_is_named(self) -> None:
        error = self.assertRaises(UnknownVm, self.vms.destroy, "unknown")
        self.assertIn("unknown", str(error))

    def test_a_vm_that_was_never_booted_needs_no_hypervisor(self) -> None:
        self.scene.machines.failing = HypervisorError("no libvirt")
        self.vms.destroy("vm")
        self.assertEqual({}, self.host.disks)

    def test_a_booted_vm_is_taken_from_the_hypervisor_first(self) -> None:
        self.vms.set_boot("vm", BOOT)
        self.scene.machines.defined.add("vm")
        self.vms.destroy("vm")
        self.assertEqual(set(), self.scene.machines.defined)
        moments = self.scene.moments
        self.assertLess(moments.index("after machines.remove"), moments.index("before snapshot.delete"))

    def test_the_disk_stays_while_the_hypervisor_may_use_it_and_repair_finishes(self) -> None:
        self.vms.set_boot("vm", BOOT)
        self.scene.machines.failing = HypervisorError("no libvirt")
        self.assertRaises(HypervisorError, self.vms.destroy, "vm")
        self.assertIn("vm", self.host.disks)
        self.assertRaises(HypervisorError, self.vms.repair, "vm")
        self.scene.machines.failing = None
        self.vms.repair("vm")
        self.assertEqual({}, self.host.disks)

    def test_a_disk_that_cannot_be_deleted_is_deleted_when_asked_again(self) -> None:
        self.host.failing = {"snapshot.delete": TROUBLE}
        self.assertRaises(DriverError, self.vms.destroy, "vm")
        self.assertIsNone(self.vms.find("vm"))
        self.host.failing = {}
        self.vms.destroy("vm")
        self.assertEqual([], self.scene.vm_shelf.names())

    def test_create_after_a_failed_destroy_makes_a_new_disk(self) -> None:
        self.host.disks["vm"].writes = "secret"
        self.host.failing = {"snapshot.delete": TROUBLE}
        self.assertRaises(DriverError, self.vms.destroy, "vm")
        self.host.failing = {}
        self.vms.create("vm", "debian", None)
        self.assertEqual("", self.host.disks["vm"].writes)

    def test_create_of_another_image_after_a_cut_create_reads_that_image(self) -> None:
        self.scene.volt.offer("alpine")
        self.scene.vm_shelf.put("vm", self.record().model_copy(update={"phase": VmPhase.CREATING}))
        self.vms.create("vm", "alpine", None)
        node = self.host.disks["vm"].origin.node
        self.assertEqual("alpine", node and node["export"])


class RepairTest(VmsTest):
    def test_a_ready_vm_is_left_alone(self) -> None:
        self.vms.create("vm", "debian", None)
        self.host.calls.clear()
        self.vms.repair("vm")
        self.vms.repair("unknown")
        self.assertEqual([], self.host.calls)

    def test_a_disk_without_a_record_is_found_and_left_alone(self) -> None:
        self.vms.create("other", "debian", None)
        self.scene.drivers.snapshot.create("stray", self.host.disks["other"].origin, MIB)
        self.assertEqual({"stray"}, self.vms.strays())
        self.scene.restart()
        self.assertIn("stray", self.host.disks)


class BootRecordTest(VmsTest):
    def setUp(self) -> None:
        super().setUp()
        self.vms.create("vm", "debian", None)

    def test_the_boot_is_recorded(self) -> None:
        self.vms.set_boot("vm", BOOT)
        self.assertEqual(BOOT, self.record().boot)

    def test_a_boot_of_an_unknown_vm_is_refused(self) -> None:
        self.assertRaises(UnknownVm, self.vms.set_boot, "unknown", BOOT)

    def test_undo_brings_the_old_record_back(self) -> None:
        before = self.vms.find("vm")
        self.vms.set_boot("vm", BOOT)
        self.vms.undo_boot("vm", before)
        self.assertEqual(before, self.record())

    def test_undo_destroys_a_vm_that_was_not_there_before(self) -> None:
        self.vms.set_boot("vm", BOOT)
        self.vms.undo_boot("vm", None)
        self.assertEqual({}, self.host.disks)
        self.assertEqual([], self.scene.vm_shelf.names())

    def test_undo_needs_no_hypervisor(self) -> None:
        self.vms.set_boot("vm", BOOT)
        self.scene.machines.failing = HypervisorError("no libvirt")
        self.vms.undo_boot("vm", None)
        self.assertEqual([], self.scene.vm_shelf.names())

    def test_undo_that_fails_is_finished_by_repair(self) -> None:
        self.vms.set_boot("vm", BOOT)
        self.host.failing = {"snapshot.delete": TROUBLE}
        self.vms.undo_boot("vm", None)
        self.assertEqual(VmPhase.DESTROYING, self.record().phase)
        self.host.failing = {}
        self.scene.restart()
        self.assertEqual({}, self.host.disks)


class LookTest(VmsTest):
    def test_records_and_devices_are_found(self) -> None:
        self.vms.create("vm", "debian", None)
        self.assertEqual(self.record(), self.vms.record("vm"))
        self.assertEqual(self.record(), self.vms.find("vm"))
        self.assertEqual([self.record()], self.vms.records())
        self.assertEqual(MIB, self.vms.device("vm").size)

    def test_unknown_vms_are_named(self) -> None:
        self.assertRaises(UnknownVm, self.vms.record, "vm")
        self.assertRaises(UnknownVm, self.vms.device, "vm")
        self.assertIsNone(self.vms.find("vm"))

    def test_a_vm_whose_disk_is_gone_is_an_error_of_its_driver(self) -> None:
        self.vms.create("vm", "debian", None)
        self.host.disks.clear()
        self.assertRaises(SnapshotMissing, self.vms.device, "vm")

    def test_half_made_vms_use_their_image_too(self) -> None:
        self.assertFalse(self.vms.uses("debian"))
        self.scene.vm_shelf.put("vm", VmRecord(name="vm", image="debian", size=None, phase=VmPhase.CREATING))
        self.assertTrue(self.vms.uses("debian"))
        self.assertIsNone(self.vms.find("vm"))
