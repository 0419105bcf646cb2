"""VMs use the disks of others: what comes and goes, what is refused, and what a failure leaves."""

from __future__ import annotations

import threading

from testtools import TestCase
from testtools.matchers import Contains

from drivers.errors import MonitorFailed
from tests.patience import PATIENCE
from tests.unit.virtman.scene import BOOT, MIB, Scene, damage
from tests.unit.virtman.test_cut_off import CutOff
from tests.unit.virtman.test_no_room import FullDisk
from virtman import attaching, booting, creating, disks, renaming
from virtman.errors import BadRequest, Conflict, HypervisorError, UnknownVm, VirtmanError, VmRuns
from virtman.records import CRASH, FROZEN, OFF, RESIZE


def a_vm_and_a_disk(scene: Scene) -> None:
    """One that runs, and one that was never booted."""
    scene.volt.offer("debian", size=MIB)
    booting.boot(scene.vms, "vm", "debian", None, BOOT, [], None)
    creating.create(scene.vms, "data", "debian", None)
    scene.host.disks["data"].writes = "precious"


def attached(scene: Scene) -> None:
    """As before, and the VM has the disk."""
    a_vm_and_a_disk(scene)
    attaching.attach(scene.vms, "vm", "data")


class AttachCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(self)
        a_vm_and_a_disk(self.scene)
        self.machines, self.vms = self.scene.machines, self.scene.vms

    def attach(self, vm: str = "vm", disk: str = "data") -> None:
        attaching.attach(self.scene.vms, vm, disk)

    def detach(self, vm: str = "vm", disk: str = "data") -> None:
        attaching.detach(self.scene.vms, vm, disk)

    def assert_has(self, *disks: str, vm: str = "vm") -> None:
        """The VM has these disks now and when it is started, and all is settled."""
        self.assertEqual(disks, self.vms.record(vm).disks)
        self.assertEqual(set(disks), set(self.machines.plugged[vm]))
        self.assertEqual("precious", self.scene.host.disks["data"].writes)
        self.scene.check(self)


class AttachTest(AttachCase):
    def test_it_comes_to_a_vm_that_runs_and_goes(self) -> None:
        for _ in range(2):
            self.attach()
            self.assert_has("data")
        for _ in range(2):
            self.detach()
            self.assert_has()

    def test_several(self) -> None:
        creating.create(self.vms, "more", "debian", None)
        self.attach(disk="more")
        self.attach()
        self.assert_has("more", "data")
        self.detach(disk="more")
        self.assert_has("data")

    def test_a_vm_that_is_off_has_it_when_it_is_started(self) -> None:
        self.machines.stop("vm", force=True)
        self.attach()
        self.assertEqual({"data"}, set(self.machines.with_disks["vm"]))
        booting.start(self.vms, "vm")
        self.assert_has("data")
        self.machines.stop("vm", force=True)
        self.detach()
        booting.start(self.vms, "vm")
        self.assert_has()

    def test_what_cannot_be_attached(self) -> None:
        creating.create(self.vms, "other", "debian", None)
        booting.boot(self.vms, "second", "debian", None, BOOT, [], None)
        self.attach("second", "other")
        cases: list[tuple[str, str, type[VirtmanError]]] = [
            ("none", "data", UnknownVm),
            ("vm", "none", UnknownVm),
            ("data", "vm", Conflict),
            ("data", "data", Conflict),
            ("vm", "vm", BadRequest),
            ("vm", "second", BadRequest),
            ("vm", "other", Conflict),
        ]
        for vm, disk, error in cases:
            self.assertRaises(error, self.attach, vm, disk)
        self.assert_has()
        self.assert_has("other", vm="second")

    def test_what_was_cut_off_with_the_disk_is_finished_first(self) -> None:
        self.scene.cut(lambda scene: disks.resize(scene.vms, "data", 2 * MIB), 1)
        self.assertTrue(self.vms.record("data").doing(RESIZE))
        self.attach()
        self.assertEqual(2 * MIB, self.vms.record("data").size)
        self.assert_has("data")

    def test_two_at_once_get_it_once(self) -> None:
        booting.boot(self.vms, "other", "debian", None, BOOT, [], None)
        refused: list[str] = []

        def attach(vm: str) -> None:
            try:
                self.attach(vm)
            except Conflict:
                refused.append(vm)

        threads = [threading.Thread(target=attach, args=[vm], daemon=True) for vm in ("vm", "other")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            self.assertFalse(thread.is_alive(), "they wait for each other")
        self.assertEqual(1, len(refused), str(refused))
        self.scene.check(self)


class UsedTest(AttachCase):
    """A disk that is attached."""

    def setUp(self) -> None:
        super().setUp()
        self.attach()

    def test_it_is_neither_booted_nor_renamed_nor_destroyed(self) -> None:
        for act in (
            lambda: booting.boot(self.vms, "data", "debian", None, BOOT, [], None),
            lambda: renaming.rename(self.scene.vms, "data", "new"),
            lambda: creating.destroy(self.vms, "data"),
        ):
            error = self.assertRaises(Conflict, act)
            self.assertEqual("disk 'data' is attached to vm 'vm'; detach it there first", str(error))
        self.assert_has("data")
        self.detach()
        creating.destroy(self.vms, "data")

    def test_nothing_is_under_way_with_its_vm_while_it_changes(self) -> None:
        with self.vms.holding("data"):
            self.assertTrue(self.vms.locks.taken("vm"))
        with self.vms.locks.hold("vm"), self.vms.holding_if_free("data") as free:
            self.assertFalse(free)

    def test_it_stays_while_the_record_of_its_vm_cannot_be_read(self) -> None:
        record = self.scene.folder / "records" / "vms" / "vm.json"
        content = record.read_bytes()
        for unreadable in (b"{torn", b'{"version": 99}'):
            damage(self.scene.vm_shelf, "vm", unreadable)
            for act in (
                lambda: booting.boot(self.vms, "data", "debian", None, BOOT, [], None),
                lambda: renaming.rename(self.scene.vms, "data", "new"),
                lambda: creating.destroy(self.vms, "data"),
            ):
                self.assertThat(str(self.assertRaises(Conflict, act)), Contains("cannot be read: vm;"))
        booting.boot(self.vms, "other", "debian", None, BOOT, [], None)
        creating.destroy(self.vms, "other")
        record.write_bytes(content)
        self.assert_has("data")

    def test_a_vm_that_is_destroyed_leaves_it(self) -> None:
        creating.destroy(self.vms, "vm")
        self.scene.check(self)
        booting.boot(self.vms, "vm", "debian", None, BOOT, [], None)
        self.assert_has()
        booting.boot(self.vms, "data", "debian", None, BOOT, [], None)

    def test_a_vm_that_gets_another_name_takes_it_along(self) -> None:
        self.machines.stop("vm", force=True)
        renaming.rename(self.scene.vms, "vm", "new")
        self.assertEqual({"data"}, set(self.machines.with_disks["new"]))
        booting.start(self.vms, "new")
        self.assert_has("data", vm="new")

    def test_it_grows_and_is_kept_as_a_part_of_its_vm(self) -> None:
        disks.resize(self.scene.vms, "data", 2 * MIB)
        self.assertEqual(CRASH, disks.take(self.scene.vms, "data", "crash").state)
        self.machines.with_agents.add("vm")
        self.assertEqual(FROZEN, disks.take(self.scene.vms, "data", "frozen").state)
        disks.drop(self.scene.vms, "data", "crash")
        self.assert_has("data")
        error = self.assertRaises(VmRuns, disks.revert, self.scene.vms, "data", "frozen")
        self.assertThat(str(error), Contains("vm 'vm' is running"))
        self.machines.stop("vm", force=True)
        self.assertEqual(OFF, disks.take(self.scene.vms, "data", "off").state)
        disks.revert(self.scene.vms, "data", "frozen")
        booting.start(self.vms, "vm")
        self.assert_has("data")


class FailureTest(AttachCase):
    def test_what_fails_is_not_attached(self) -> None:
        for call, error in (("plug", MonitorFailed("device_add", "no")), ("follow", HypervisorError("away"))):
            self.machines.failing[call] = error
            self.assertRaises(type(error), self.attach)
            self.machines.failing.clear()
            disks.repair(self.vms, "vm")
            self.assert_has()
        self.attach()
        self.assert_has("data")

    def test_what_is_not_detached_stays(self) -> None:
        self.attach()
        for call, error in (("unplug", MonitorFailed("device_del", "no")), ("running_vm", HypervisorError("away"))):
            self.machines.failing[call] = error
            self.assertRaises(type(error), self.detach)
            self.machines.failing.clear()
            self.assert_has("data")


class AttachCutOffTest(CutOff):
    def test_what_was_being_attached_is(self) -> None:
        def is_attached(scene: Scene) -> None:
            attaching.attach(scene.vms, "vm", "data")
            self.assertEqual({"data"}, set(scene.machines.plugged["vm"]))
            scene.check(self)

        moments = self.cut_everywhere(a_vm_and_a_disk, lambda s: attaching.attach(s.vms, "vm", "data"), is_attached)
        steps = {"attach-disk:recorded", "attach-disk:plugged", "attach-disk:followed", "attach-disk:done"}
        self.assertEqual(set(), steps - set(moments))

    def test_a_repair_that_meets_another_job_of_the_vm_is_done_in_the_same_go(self) -> None:
        scene, real = Scene(self), disks.repair
        attached(scene)
        scene.cut(lambda s: attaching.detach(s.vms, "vm", "data"), 3)
        kept_away = iter(range(2))
        self.patch(disks, "repair", lambda vms, vm: next(kept_away, None) is None and real(vms, vm))
        scene.restart()
        self.assertEqual(set(), {vm.name for vm in scene.vms.records.all() if not vm.steady})

    def test_what_was_being_detached_is(self) -> None:
        def is_detached(scene: Scene) -> None:
            attaching.detach(scene.vms, "vm", "data")
            self.assertEqual({}, scene.machines.plugged["vm"])
            creating.destroy(scene.vms, "data")
            scene.check(self)

        moments = self.cut_everywhere(attached, lambda s: attaching.detach(s.vms, "vm", "data"), is_detached)
        steps = {"detach-disk:recorded", "detach-disk:unplugged", "detach-disk:followed", "detach-disk:done"}
        self.assertEqual(set(), steps - set(moments))

    def test_snapshots_of_an_attached_disk(self) -> None:
        def is_whole(scene: Scene) -> None:
            disks.take(scene.vms, "data", "snapshot")
            scene.check(self)

        self.cut_everywhere(attached, lambda scene: disks.take(scene.vms, "data", "snapshot"), is_whole)


class AttachNoRoomTest(FullDisk):
    def test_a_full_disk_leaves_a_vm_with_the_disk_or_without_it(self) -> None:
        for given, act, least in (
            (a_vm_and_a_disk, lambda scene: attaching.attach(scene.vms, "vm", "data"), 0),
            (attached, lambda scene: attaching.detach(scene.vms, "vm", "data"), 1),
        ):
            scenes = self.full_from_each_write_on(given, act)
            for number, scene in enumerate(scenes):
                has = least if number == 0 else 0
                scene.make_room()
                disks.repair(scene.vms, "vm")
                scene.check(self)
                self.assertEqual(has, len(scene.machines.plugged["vm"]))
                self.assertEqual("precious", scene.host.disks["data"].writes)
