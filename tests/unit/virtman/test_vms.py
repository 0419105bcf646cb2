"""One host's VMs."""

from __future__ import annotations

import threading

from testtools import TestCase

from drivers.errors import DriverError
from tests.patience import PATIENCE
from tests.unit.virtman.scene import BOOT, MIB, TROUBLE, Scene
from virtman import booting, creating, disks, hosting
from virtman.errors import (
    BadSize,
    Conflict,
    DomainForeign,
    HypervisorAbsent,
    HypervisorError,
    UnknownImage,
    VmExists,
    VmRuns,
)
from virtman.records import State, VmRecord
from virtman.sizes import LARGEST_DISK


class VmsTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(self)
        self.scene.volt.offer("debian", size=MIB)
        self.vms, self.host = self.scene.vms, self.scene.host

    def boot(self) -> None:
        booting.boot(self.vms, "vm", "debian", None, BOOT, [], None)


class CreateTest(VmsTest):
    def test_a_disk_has_the_size_of_its_image_or_a_larger_one_and_is_made_on_the_hosts_own_export(self) -> None:
        creating.create(self.vms, "vm", "debian", None)
        creating.create(self.vms, "larger", "debian", 5 * MIB)
        self.assertEqual((MIB, 5 * MIB), (self.host.disks["vm"].size, self.host.disks["larger"].size))
        export = self.scene.stacks.source.device(hosting.ensure(self.scene.stacks, "debian").image)
        self.assertEqual(export, self.host.disks["vm"].origin)
        record = self.scene.vms.record("vm")
        self.assertEqual(VmRecord(name="vm", image="debian", size=MIB, state=State.PRESENT, uuid=record.uuid), record)

    def test_asked_again_it_leaves_the_disk_alone(self) -> None:
        creating.create(self.vms, "vm", "debian", None)
        self.host.disks["vm"].writes = "precious"
        for size in (None, MIB):
            creating.create(self.vms, "vm", "debian", size)
        self.assertEqual("precious", self.host.disks["vm"].writes)

    def test_another_image_or_size_is_refused(self) -> None:
        self.scene.volt.offer("alpine", size=MIB)
        creating.create(self.vms, "vm", "debian", None)
        for image, size in (("alpine", None), ("debian", 2 * MIB)):
            error = self.assertRaises(VmExists, creating.create, self.vms, "vm", image, size)
            self.assertIn("debian", str(error))
        self.assertEqual(["debian"], [record.image for record in self.vms.records.all()])

    def test_impossible_sizes_are_refused_before_anything_is_done(self) -> None:
        for size in (0, -512, 1, 513, MIB + 1, LARGEST_DISK + 512):
            self.assertRaises(BadSize, creating.create, self.vms, "vm", "debian", size)
        self.assertEqual([], self.host.calls)
        self.assertEqual([], self.scene.vm_shelf.names())

    def test_an_unknown_image_or_less_than_the_image_leaves_nothing(self) -> None:
        for error, image, size in ((UnknownImage, "unknown", None), (BadSize, "debian", MIB - 512)):
            self.assertRaises(error, creating.create, self.vms, "vm", image, size)
            self.scene.check_empty(self)

    def test_many_vms_of_many_images_and_each_of_them_several_times_at_once(self) -> None:
        images = [f"image-{number}" for number in range(5)]
        for image in images:
            self.scene.volt.offer(image)
        threads = [
            threading.Thread(target=creating.create, args=(self.vms, f"{image}-{number}", image, None))
            for number in range(4)
            for image in images * 2
        ]
        for thread in threads:
            self.addCleanup(thread.join, PATIENCE)
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        self.assertEqual(20, len(self.host.disks))
        calls = self.host.calls
        self.assertEqual((5, 20), (calls.count("attach.connect"), calls.count("snapshot.create")))
        self.scene.check(self)


class DestroyTest(VmsTest):
    def setUp(self) -> None:
        super().setUp()
        creating.create(self.vms, "vm", "debian", None)

    def test_a_vm_that_was_never_booted_needs_no_hypervisor(self) -> None:
        self.scene.machines.failing = {"remove": HypervisorError("no libvirt")}
        creating.destroy(self.vms, "vm")
        self.assertEqual({}, self.host.disks)

    def test_a_booted_vm_is_taken_from_the_hypervisor_first(self) -> None:
        self.boot()
        creating.destroy(self.vms, "vm")
        self.assertEqual({}, self.scene.machines.running)
        moments = self.scene.moments
        self.assertLess(moments.index("after machines.remove"), moments.index("before snapshot.delete"))

    def test_the_disk_stays_while_the_hypervisor_may_use_it_and_repair_finishes(self) -> None:
        self.boot()
        self.scene.machines.failing = {"remove": HypervisorError("no libvirt")}
        self.assertRaises(HypervisorError, creating.destroy, self.vms, "vm")
        self.assertIn("vm", self.host.disks)
        self.assertRaises(HypervisorError, disks.repair, self.vms, "vm")
        self.scene.machines.failing = {}
        disks.repair(self.vms, "vm")
        self.assertEqual({}, self.host.disks)

    def test_create_after_a_failed_destroy_makes_a_new_disk_which_is_destroyed_when_asked_again(self) -> None:
        for again in (creating.destroy, lambda vms, vm: creating.create(vms, vm, "debian", None)):
            self.host.disks["vm"].writes = "secret"
            self.host.failing = {"snapshot.delete": TROUBLE}
            self.assertRaises(DriverError, creating.destroy, self.vms, "vm")
            self.host.failing = {}
            again(self.vms, "vm")
            creating.create(self.vms, "vm", "debian", None)
            self.assertEqual("", self.host.disks["vm"].writes)

    def test_one_that_is_received_after_a_cut_destroy_is_new(self) -> None:
        self.host.disks["vm"].writes = "secret"
        self.scene.vm_shelf.put("vm", self.scene.vms.record("vm").begin("destroy"))
        creating.receive(
            self.vms, "vm", "debian", MIB, [],
            lambda stack: creating.Made(creating.new_disk(self.vms, "vm", stack, MIB)),
        )  # fmt: skip
        self.assertEqual("", self.host.disks["vm"].writes)
        self.scene.check(self)


class RepairTest(VmsTest):
    def test_a_ready_vm_is_left_alone(self) -> None:
        creating.create(self.vms, "vm", "debian", None)
        self.host.calls.clear()
        disks.repair(self.vms, "vm")
        disks.repair(self.vms, "unknown")
        self.assertEqual([], self.host.calls)

    def test_a_disk_without_a_record_is_found_and_left_alone(self) -> None:
        creating.create(self.vms, "other", "debian", None)
        self.scene.vms.vmdisks.create("stray", self.host.disks["other"].origin, MIB)
        self.assertEqual({"stray"}, self.vms.orphans())
        self.scene.restart()
        self.assertIn("stray", self.host.disks)


class BootTest(VmsTest):
    def setUp(self) -> None:
        super().setUp()
        self.machines = self.scene.machines

    def test_a_new_vm_that_is_refused_leaves_nothing(self) -> None:
        self.machines.failing = {"start": DomainForeign("somebody else's")}
        self.assertRaises(DomainForeign, self.boot)
        hosting.remove_if_idle(self.scene.stacks, "debian")
        self.scene.check_empty(self)

    def test_a_disk_that_was_there_outlives_a_boot_that_is_refused(self) -> None:
        creating.create(self.vms, "vm", "debian", None)
        before = self.scene.vms.record("vm")
        self.machines.failing = {"start": DomainForeign("somebody else's")}
        self.assertRaises(DomainForeign, self.boot)
        self.assertEqual(before, self.scene.vms.record("vm"))
        self.scene.check(self)

    def test_no_hypervisor_at_all_needs_none_to_undo_the_boot(self) -> None:
        gone = HypervisorAbsent("no libvirt")
        self.machines.failing = {"start": gone, "remove": gone, "machine": gone}
        self.assertRaises(HypervisorAbsent, self.boot)
        self.assertEqual({}, self.host.disks)
        self.assertEqual([], self.scene.vm_shelf.names())

    def lose_the_hypervisor(self) -> None:
        """It starts the VM and dies before it says so."""
        gone = HypervisorError("libvirtd is gone")
        self.machines.failing = {"start's answer": gone, "remove": gone, "machine": gone}
        self.assertRaises(HypervisorError, self.boot)
        self.machines.failing = {}

    def test_a_disk_is_never_deleted_under_a_vm_that_may_run(self) -> None:
        self.lose_the_hypervisor()
        self.assertIn("vm", self.machines.running)
        self.assertIn("vm", self.host.disks)
        self.assertEqual(BOOT, self.scene.vms.record("vm").boot, "nobody forgets that it may run")
        self.scene.restart()  # the hypervisor is back
        self.scene.check(self)
        self.assertEqual({}, self.machines.running)

    def test_a_disk_that_was_there_is_kept_when_the_hypervisor_dies(self) -> None:
        creating.create(self.vms, "vm", "debian", None)
        self.host.disks["vm"].writes = "precious"
        self.lose_the_hypervisor()
        self.assertEqual(BOOT, self.scene.vms.record("vm").boot)
        self.scene.restart()
        self.assertEqual("precious", self.host.disks["vm"].writes)
        self.assertIn("vm", self.machines.running, "the hypervisor has it, so the boot is finished")
        self.scene.check(self)

    def test_a_boot_again_that_fails_keeps_what_was_known_of_the_machine(self) -> None:
        self.boot()
        self.machines.failing = {"start": HypervisorError("no memory")}
        other = BOOT.model_copy(update={"memory": 128})
        self.assertRaises(HypervisorError, booting.boot, self.vms, "vm", "debian", None, other, [], None)
        self.assertEqual(BOOT, self.scene.vms.record("vm").boot)
        self.assertIn("vm", self.machines.running)
        self.scene.check(self)

    def test_a_boot_of_a_running_vm_with_another_machine_is_refused_and_the_record_stays(self) -> None:
        self.boot()
        other = BOOT.model_copy(update={"memory": 128})
        self.assertRaises(VmRuns, booting.boot, self.vms, "vm", "debian", None, other, [], None)
        self.assertRaises(VmRuns, booting.boot, self.vms, "vm", "debian", None, BOOT, ["key"], None)
        self.assertEqual(BOOT, self.scene.vms.record("vm").boot)
        self.scene.check(self)

    def test_a_boot_of_a_running_vm_that_was_cut_off_is_recorded_with_what_runs(self) -> None:
        self.boot()
        other = BOOT.model_copy(update={"memory": 128})
        self.scene.cut(lambda scene: booting.boot(scene.vms, "vm", "debian", None, other, [], None), 1)
        self.assertEqual(other, self.scene.vms.record("vm").boot)
        self.scene.restart()
        self.assertEqual(BOOT, self.scene.vms.record("vm").boot)
        self.scene.check(self)

    def test_a_vm_is_started_again_as_it_was_booted_or_changed_since(self) -> None:
        self.boot()
        for machine in (BOOT, BOOT.model_copy(update={"memory": 128, "network": "direct"})):
            self.machines.running.clear()
            self.machines.edit("vm", machine)
            booting.start(self.vms, "vm")
            self.assertIn("vm", self.machines.running)
            self.assertEqual((machine, machine), (self.scene.vms.record("vm").boot, self.machines.machine("vm")))
            self.scene.check(self)

    def test_a_vm_that_was_never_booted_cannot_be_started_again(self) -> None:
        creating.create(self.vms, "vm", "debian", None)
        self.assertRaises(Conflict, booting.start, self.vms, "vm")

    def test_a_vm_that_is_destroyed_is_off_before_another_operation_has_ended(self) -> None:
        self.boot()
        off = threading.Event()

        def moment(name: str) -> None:
            if name == "before machines.remove":
                self.assertEqual({}, self.machines.running)
            if name == "before machines.stop":
                off.set()

        self.machines.moment = moment
        thread = threading.Thread(target=creating.destroy, args=[self.vms, "vm"])
        with self.vms.locks.hold("vm"):
            thread.start()
            self.assertTrue(off.wait(PATIENCE))
        thread.join()
        self.assertEqual({}, self.host.disks)

    def test_a_boot_after_a_cut_boot_does_not_take_the_disk_for_its_own(self) -> None:
        creating.create(self.vms, "vm", "debian", None)
        self.host.disks["vm"].writes = "precious"
        self.scene.cut(lambda scene: booting.boot(scene.vms, "vm", "debian", None, BOOT, [], None), 1)
        self.machines.failing = {"start": HypervisorError("no memory")}
        self.assertRaises(HypervisorError, self.boot)
        self.assertEqual("precious", self.host.disks["vm"].writes)


class LookTest(VmsTest):
    def test_half_made_vms_use_their_image_too(self) -> None:
        self.assertFalse(self.scene.stacks.in_use("debian"))
        self.scene.vm_shelf.put(
            "vm", VmRecord(name="vm", image="debian", size=None, state=State.ABSENT).begin("create")
        )
        self.assertTrue(self.scene.stacks.in_use("debian"))
