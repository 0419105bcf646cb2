"""VMs' disks grow, and points in time of them are kept."""

from __future__ import annotations

from testtools import TestCase
from testtools.matchers import Contains

from drivers.errors import DiskInUse, DriverError, NotPossible
from tests.doubles.drivers import Disk
from tests.unit.virtman.scene import BOOT, MIB, NOW, TROUBLE, Scene
from virtman import booting, creating, disks, renaming
from virtman.errors import BadRequest, BadSize, UnknownSnapshot, UnknownVm, VmExists, VmRuns
from virtman.records import CRASH, FROZEN, OFF, REVERT, Snapshot, VmRecord


class DisksTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(self)
        self.addCleanup(self.scene.check, self)
        self.scene.volt.offer("debian", size=MIB)
        creating.create(self.scene.vms, "vm", "debian", None)
        self.host = self.scene.host

    @property
    def disk(self) -> Disk:
        return self.host.disks["vm"]

    @property
    def record(self) -> VmRecord:
        return self.scene.vms.record("vm")

    def boot(self) -> None:
        booting.boot(self.scene.vms, "vm", "debian", None, BOOT, [], None)

    def take(self, *names: str) -> None:
        for name in names:
            self.disk.writes = name
            disks.take(self.scene.vms, "vm", name)

    def tree(self) -> dict[str, str | None]:
        return {snapshot.name: snapshot.parent for snapshot in self.record.snapshots}

    def heal(self) -> None:
        self.host.failing.clear()
        self.scene.machines.failing.clear()
        disks.repair(self.scene.vms, "vm")


class ResizeTest(DisksTest):
    def test_the_size_that_it_has_is_fine(self) -> None:
        self.disk.stranger = True
        disks.resize(self.scene.vms, "vm", MIB)
        self.assertNotIn("snapshot.resize", self.host.calls)

    def test_a_smaller_or_odd_size_is_refused(self) -> None:
        for size in (MIB - 512, MIB + 1, 0, -512, 1 << 61):
            self.assertRaises(BadSize, disks.resize, self.scene.vms, "vm", size)
        self.assertRaises(UnknownVm, disks.resize, self.scene.vms, "other", MIB)
        self.assertEqual(MIB, self.record.size)

    def test_a_failure_leaves_the_size_that_the_disk_has(self) -> None:
        self.host.failing["snapshot.resize"] = TROUBLE
        self.assertRaises(DriverError, disks.resize, self.scene.vms, "vm", 5 * MIB)
        self.assertTrue(self.record.steady)

    def test_a_disk_grows_and_a_running_vm_is_told_by_its_monitor(self) -> None:
        disks.resize(self.scene.vms, "vm", 5 * MIB)
        self.assertEqual((5 * MIB, 5 * MIB), (self.disk.size, self.record.size))
        self.boot()
        self.disk.stranger = True
        disks.resize(self.scene.vms, "vm", 6 * MIB)
        self.assertEqual(6 * MIB, self.disk.size)


class TakeTest(DisksTest):
    def test_a_snapshot_is_written_down(self) -> None:
        self.disk.writes = "then"
        snapshot = disks.take(self.scene.vms, "vm", "a")
        self.assertEqual(Snapshot(name="a", parent=None, size=MIB, taken=NOW, state=CRASH, id=snapshot.id), snapshot)
        self.assertNotEqual(snapshot.id, disks.take(self.scene.vms, "vm", "b").id)
        disks.drop(self.scene.vms, "vm", "b")
        self.assertEqual(((snapshot,), "a"), (self.record.snapshots, self.record.current))
        self.assertEqual({"a": ("then", MIB)}, self.disk.snapshots)

    def test_asked_again_it_answers_the_same(self) -> None:
        first = disks.take(self.scene.vms, "vm", "a")
        self.disk.writes = "late"
        self.assertEqual(first, disks.take(self.scene.vms, "vm", "a"))
        self.assertEqual(1, len(self.record.snapshots))

    def test_each_snapshot_comes_after_the_one_before(self) -> None:
        self.take("a", "b")
        disks.revert(self.scene.vms, "vm", "a")
        self.take("c")
        self.assertEqual({"a": None, "b": "a", "c": "a"}, self.tree())

    def test_what_runs_says_how_the_disk_was(self) -> None:
        self.boot()
        self.assertEqual(CRASH, disks.take(self.scene.vms, "vm", "without-agent").state)
        self.scene.machines.with_agents.add("vm")
        self.assertEqual(FROZEN, disks.take(self.scene.vms, "vm", "with-agent").state)
        disk = self.scene.machines.running.pop("vm")
        self.assertEqual(OFF, disks.take(self.scene.vms, "vm", "off").state)
        self.scene.machines.running["vm"] = disk

    def test_the_guest_goes_on_also_after_a_failure(self) -> None:
        self.boot()
        self.scene.machines.with_agents.add("vm")
        self.host.failing["snapshot.take"] = TROUBLE
        self.assertRaises(DriverError, disks.take, self.scene.vms, "vm", "a")
        self.assertIn("after machines.freeze", self.scene.moments)
        self.assertEqual(set(), self.scene.machines.frozen)
        self.assertEqual(((), None), (self.record.snapshots, self.record.current))


class RevertTest(DisksTest):
    def test_the_disk_holds_what_it_held_then(self) -> None:
        self.take("a")
        disks.resize(self.scene.vms, "vm", 5 * MIB)
        self.take("b")
        disks.revert(self.scene.vms, "vm", "a")
        self.assertEqual(
            ("a", MIB, MIB, "a"), (self.disk.writes, self.disk.size, self.record.size, self.record.current)
        )
        disks.revert(self.scene.vms, "vm", "b")
        self.assertEqual(("b", 5 * MIB, "b"), (self.disk.writes, self.record.size, self.record.current))

    def test_a_running_vm_is_left_alone(self) -> None:
        self.take("a")
        self.boot()
        self.disk.writes = "now"
        self.assertRaises(VmRuns, disks.revert, self.scene.vms, "vm", "a")
        self.assertEqual("now", self.disk.writes)

    def test_what_the_driver_refuses_is_not_tried_again(self) -> None:
        self.take("a", "b")
        for refusal in (DiskInUse("vm"), NotPossible("not this disk")):
            self.host.failing["snapshot.revert"] = refusal
            self.assertRaises(type(refusal), disks.revert, self.scene.vms, "vm", "a")
            self.assertEqual((True, "b"), (self.record.steady, self.record.current))

    def test_a_snapshot_that_is_not_there_is_named_with_those_that_are(self) -> None:
        self.take("a", "b")
        for call in (disks.revert, disks.drop):
            error = self.assertRaises(UnknownSnapshot, call, self.scene.vms, "vm", "c")
            self.assertThat(str(error), Contains("it has: a, b"))

    def test_one_that_failed_half_way_is_finished(self) -> None:
        self.take("a", "b")
        self.host.failing["snapshot.revert"] = TROUBLE
        self.assertRaises(DriverError, disks.revert, self.scene.vms, "vm", "a")
        self.assertTrue(self.record.doing(REVERT))
        self.heal()
        self.assertEqual(("a", "a"), (self.disk.writes, self.record.current))


class DropTest(DisksTest):
    def test_what_came_after_it_comes_after_the_one_before(self) -> None:
        self.take("a", "b", "c")
        disks.drop(self.scene.vms, "vm", "b")
        self.assertEqual({"a": None, "c": "a"}, self.tree())
        disks.drop(self.scene.vms, "vm", "c")
        self.assertEqual("a", self.record.current)
        disks.drop(self.scene.vms, "vm", "a")
        self.assertEqual(({}, None, {}), (self.tree(), self.record.current, self.disk.snapshots))

    def test_a_failure_before_it_is_gone_changes_nothing(self) -> None:
        self.take("a")
        self.host.failing["snapshot.drop"] = TROUBLE
        self.assertRaises(DriverError, disks.drop, self.scene.vms, "vm", "a")
        self.assertEqual(({"a": None}, True), (self.tree(), self.record.steady))


class AfterFailureTest(DisksTest):
    """What is tried again later never takes what came since."""

    def test_a_new_snapshot_is_not_taken_for_what_is_left_of_an_old_one(self) -> None:
        self.take("a", "b")
        self.scene.vm_shelf.put("vm", self.record.without("a").settled(untidy="a"))
        self.disk.snapshots.pop("a")
        self.take("a")
        self.heal()
        self.assertEqual(({"a", "b"}, {"a", "b"}), (set(self.tree()), set(self.disk.snapshots)))

    def test_going_back_that_was_cut_off_is_given_up_while_somebody_uses_the_disk(self) -> None:
        self.take("a", "b")
        self.scene.vm_shelf.put("vm", self.record.begin(REVERT, snapshot="a"))
        self.disk.stranger = True
        self.disk.writes = "theirs"
        self.heal()
        self.disk.stranger = False
        self.heal()
        self.assertEqual(("theirs", "b", True), (self.disk.writes, self.record.current, self.record.steady))


class TemporarySnapshotTest(DisksTest):
    def test_it_is_there_meanwhile_and_nobody_sees_it_afterwards(self) -> None:
        self.take("a")
        with disks.temporary(self.scene.vms, "vm") as snapshot:
            self.assertEqual({"a", snapshot.name}, set(self.disk.snapshots))
            self.assertEqual("a", snapshot.parent)
            self.assertEqual("a", self.record.current)
        self.assertEqual(({"a": None}, {"a"}), (self.tree(), set(self.disk.snapshots)))

    def test_repair_leaves_one_alone_that_is_in_use(self) -> None:
        with disks.temporary(self.scene.vms, "vm") as one, disks.temporary(self.scene.vms, "vm") as other:
            disks.repair(self.scene.vms, "vm")
            self.assertEqual({one.name, other.name}, set(self.disk.snapshots))
            self.assertEqual([], disks.leftovers(self.scene.vms, self.record))
        self.assertEqual({}, self.disk.snapshots)

    def test_what_is_taken_meanwhile_does_not_come_after_it(self) -> None:
        with disks.temporary(self.scene.vms, "vm"):
            self.take("a")
        self.assertEqual({"a": None}, self.tree())

    def test_nobody_else_may_name_his_so(self) -> None:
        self.assertRaises(BadRequest, disks.take, self.scene.vms, "vm", "temporary-of-mine")
        self.assertEqual({}, self.disk.snapshots)

    def test_those_that_are_refused_a_snapshot_are_not_told_of_one(self) -> None:
        with disks.temporary(self.scene.vms, "vm"):
            error = self.assertRaises(UnknownSnapshot, disks.drop, self.scene.vms, "vm", "b")
            for own in list(self.disk.snapshots):
                self.assertRaises(UnknownSnapshot, disks.drop, self.scene.vms, "vm", own)
        self.assertThat(str(error), Contains("it has: none"))


class CloneTest(DisksTest):
    def clones(self) -> dict[str, str]:
        return {name: disk.writes for name, disk in self.host.disks.items() if name != "vm"}

    def test_they_hold_what_the_disk_held_then(self) -> None:
        disks.resize(self.scene.vms, "vm", 5 * MIB)
        self.disk.writes = "then"
        creating.clone(self.scene.vms, "vm", ["new", "newer", "new"])
        self.disk.writes = "late"
        self.assertEqual({"new": "then", "newer": "then"}, self.clones())
        record = self.scene.vms.record("new")
        self.assertEqual(("vm", "debian", 5 * MIB, ()), (record.source, record.image, record.size, record.snapshots))
        self.assertEqual(({}, ()), (self.disk.snapshots, self.record.snapshots))

    def test_those_that_are_there_are_left_alone(self) -> None:
        creating.clone(self.scene.vms, "vm", ["new"])
        self.host.disks["new"].writes = "mine"
        self.host.calls.clear()
        creating.clone(self.scene.vms, "vm", ["new"])
        self.assertEqual([], self.host.calls)
        creating.clone(self.scene.vms, "vm", ["new", "newer"])
        self.assertEqual({"new": "mine", "newer": ""}, self.clones())

    def test_a_name_of_another_vm_is_refused(self) -> None:
        creating.create(self.scene.vms, "other", "debian", None)
        for names in (["vm"], ["new", "other"]):
            self.assertRaises(VmExists, creating.clone, self.scene.vms, "vm", names)
        self.assertEqual({"other": ""}, self.clones())
        self.assertRaises(UnknownVm, creating.clone, self.scene.vms, "none", ["new"])

    def test_a_failure_leaves_those_that_are_whole_and_asked_again_the_others_are_made(self) -> None:
        creating.clone(self.scene.vms, "vm", ["before"])
        failing = iter([None, None, TROUBLE])

        def fail(moment: str) -> None:
            if moment == "within snapshot.clone" and (error := next(failing)):
                raise error

        self.host.moment = fail
        self.assertRaises(DriverError, creating.clone, self.scene.vms, "vm", ["one", "two", "tri", "four"])
        self.host.moment = self.scene.moment
        self.assertEqual({"before", "one", "two"}, set(self.clones()))
        self.assertEqual({}, self.disk.snapshots)
        self.host.disks["one"].writes = "mine"
        creating.clone(self.scene.vms, "vm", ["one", "two", "tri", "four"])
        self.assertEqual({"before": "", "one": "mine", "two": "", "tri": "", "four": ""}, self.clones())

    def test_one_of_another_image_or_about_to_go_is_not_taken_for_it(self) -> None:
        creating.clone(self.scene.vms, "vm", ["new"])
        record = self.scene.vms.record("new")
        self.scene.vm_shelf.put("new", record.begin("destroy"))
        self.host.disks["new"].writes = "old"
        creating.clone(self.scene.vms, "vm", ["new"])
        self.assertEqual({"new": ""}, self.clones())
        self.scene.volt.offer("other", size=MIB)
        creating.destroy(self.scene.vms, "vm")
        creating.create(self.scene.vms, "vm", "other", None)
        self.assertRaises(VmExists, creating.clone, self.scene.vms, "vm", ["new"])

    def test_one_of_a_vm_that_had_the_name_before_is_not_taken_for_it(self) -> None:
        creating.clone(self.scene.vms, "vm", ["new"])
        renaming.rename(self.scene.vms, "vm", "old")
        creating.create(self.scene.vms, "vm", "debian", None)
        self.assertRaises(VmExists, creating.clone, self.scene.vms, "vm", ["new"])
        creating.destroy(self.scene.vms, "vm")
        creating.create(self.scene.vms, "vm", "debian", None)
        self.assertRaises(VmExists, creating.clone, self.scene.vms, "vm", ["new"])
