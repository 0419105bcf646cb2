"""VMs get other names: what goes along, what is refused, and what a failure leaves."""

from __future__ import annotations

from testtools import TestCase

from drivers.errors import DiskInUse, HostFailed
from tests.unit.virtman.scene import BOOT, MIB, Scene
from tests.unit.virtman.test_cut_off import CutOff
from virtman import booting, creating, disks, renaming
from virtman.errors import HypervisorError, UnknownVm, VirtmanError, VmExists, VmRuns


def a_vm(scene: Scene) -> None:
    """One that was booted, is off, and has a snapshot."""
    scene.volt.offer("debian", size=MIB)
    booting.boot(scene.vms, "vm", "debian", None, BOOT, [], None)
    scene.machines.running.clear()
    scene.host.disks["vm"].writes = "then"
    disks.take(scene.vms, "vm", "snapshot")
    scene.host.disks["vm"].writes = "precious"


class RenameTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(self)
        a_vm(self.scene)

    def rename(self, vm: str = "vm", new: str = "new") -> None:
        renaming.rename(self.scene.vms, vm, new)

    def names(self) -> list[str]:
        return [record.name for record in self.scene.vms.records.all()]

    def assert_untouched(self) -> None:
        self.assertEqual((["vm"], "precious"), (self.names(), self.scene.host.disks["vm"].writes))
        self.assertTrue(self.scene.vms.record("vm").steady)
        self.assertEqual(({"vm"}, set()), (self.scene.machines.files, self.scene.machines.unfollowed))

    def test_all_of_it_has_the_new_name(self) -> None:
        before = self.scene.vms.record("vm")
        self.rename()
        record = self.scene.vms.record("new")
        self.assertEqual(["new"], self.names())
        self.assertEqual(before.model_copy(update={"name": "new", "was": "vm"}), record)
        self.assertEqual({"new": "precious"}, {name: disk.writes for name, disk in self.scene.host.disks.items()})
        self.assertEqual({"new"}, self.scene.machines.files)
        booting.start(self.scene.vms, "new")
        self.assertEqual({"new": before.uuid}, self.scene.machines.uuids)
        self.assertEqual(self.scene.vms.vmdisks.open("new"), self.scene.machines.defined["new"])
        self.scene.check(self)

    def test_asked_again_it_answers_the_same(self) -> None:
        for _ in range(2):
            self.rename()
        self.assertEqual(["new"], self.names())

    def test_a_new_vm_of_the_old_name_is_another_one(self) -> None:
        self.rename()
        booting.boot(self.scene.vms, "vm", "debian", None, BOOT, [], None)
        self.assertNotEqual(*self.scene.machines.uuids.values())
        self.assertRaises(VmExists, self.rename)
        self.rename("new", "third")
        self.assertRaises(VmExists, self.rename, "third", "vm")

    def test_a_vm_that_was_never_booted(self) -> None:
        creating.create(self.scene.vms, "disk", "debian", None)
        self.scene.machines.failing["rename"] = HypervisorError("away")
        self.rename("disk", "other")
        self.assertEqual(["other", "vm"], self.names())

    def test_clones_are_known_by_the_new_name(self) -> None:
        creating.clone(self.scene.vms, "vm", ["clone"])
        self.rename()
        creating.clone(self.scene.vms, "new", ["clone"])
        self.assertRaises(VmExists, creating.clone, self.scene.vms, "new", ["new"])

    def test_what_cannot_be(self) -> None:
        creating.create(self.scene.vms, "other", "debian", None)
        cases: list[tuple[str, str, type[VirtmanError]]] = [
            ("vm", "vm", VmExists),
            ("vm", "other", VmExists),
            ("none", "other", VmExists),
            ("none", "new", UnknownVm),
        ]
        for vm, new, error in cases:
            self.assertRaises(error, self.rename, vm, new)
        creating.destroy(self.scene.vms, "other")
        self.assert_untouched()

    def test_a_vm_that_runs_keeps_its_name(self) -> None:
        booting.start(self.scene.vms, "vm")
        self.assertRaises(VmRuns, self.rename)
        self.assertNotIn("rename:recorded", self.scene.moments)
        self.assert_untouched()

    def test_a_failure_leaves_the_old_name(self) -> None:
        self.scene.host.disks["vm"].stranger = True
        self.assertRaises(DiskInUse, self.rename)
        self.assert_untouched()
        self.scene.host.disks["vm"].stranger = False
        for failing, call, error in (
            (self.scene.machines.failing, "rename", HypervisorError("away")),
            (self.scene.host.failing, "snapshot.rename", HostFailed(OSError(5, "broken"))),
        ):
            failing[call] = error
            self.assertRaises(type(error), self.rename)
            failing.clear()
            disks.repair(self.scene.vms, "vm")
            self.assert_untouched()
        self.rename()

    def test_once_the_disk_has_the_new_name_it_is_finished_later(self) -> None:
        self.scene.machines.failing["follow"] = HypervisorError("away")
        self.assertRaises(HypervisorError, self.rename)
        self.assertFalse(self.scene.vms.record("vm").steady)
        self.scene.machines.failing.clear()
        error = self.assertRaises(VmExists, creating.create, self.scene.vms, "new", "debian", None)
        self.assertIn("is being renamed to 'new'", str(error))
        disks.repair(self.scene.vms, "vm")
        self.assertEqual(["new"], self.names())
        booting.start(self.scene.vms, "new")
        self.scene.check(self)

    def test_nobody_makes_a_vm_of_the_new_name_meanwhile(self) -> None:
        taken = list[bool]()
        self.scene.machines.moment = lambda _moment: taken.append(self.scene.vms.locks.taken("new"))
        self.rename()
        self.assertEqual({True}, set(taken))


class RenameCutOffTest(CutOff):
    def test_a_vm_has_one_name_and_all_of_it(self) -> None:
        def one_name(scene: Scene) -> None:
            if scene.vms.records.get("vm") is not None:
                renaming.rename(scene.vms, "vm", "new")
            self.assertEqual(["new"], [record.name for record in scene.vms.records.all()])
            self.assertEqual({"new": "precious"}, {name: disk.writes for name, disk in scene.host.disks.items()})
            booting.start(scene.vms, "new")
            self.assertEqual({"new": scene.vms.record("new").uuid}, scene.machines.uuids)
            scene.check(self)

        moments = self.cut_and_restart(a_vm, lambda scene: renaming.rename(scene.vms, "vm", "new"), one_name)
        self.assertTrue({"rename:recorded", "rename:disk", "rename:known"} <= set(moments), str(moments))

    def cut_at(self, step: str) -> Scene:
        """A host whose agent was killed there and has started again, and has repaired nothing yet."""
        scene = Scene(self)
        a_vm(scene)
        scene.cut(lambda scene: renaming.rename(scene.vms, "vm", "new"), 0)
        number = scene.moments.index(step) + 1
        scene = Scene(self)
        a_vm(scene)
        scene.cut(lambda scene: renaming.rename(scene.vms, "vm", "new"), number)
        scene.start()
        return scene

    def test_no_other_vm_gets_the_name_that_one_is_getting(self) -> None:
        scene = self.cut_at("rename:recorded")
        creating.create(scene.vms, "other", "debian", None)
        self.assertRaises(VmExists, renaming.rename, scene.vms, "other", "new")
        with scene.vms.holding("vm"):
            self.assertTrue(scene.vms.locks.taken("new"))
        disks.repair(scene.vms, "vm")
        self.assertEqual(["new", "other"], [record.name for record in scene.vms.records.all()])
