"""VMs leave a host and arrive at another one: what is refused, and where a VM is after a failure."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

from testtools import TestCase
from testtools.matchers import Contains

from drivers.errors import NotPossible
from tests.doubles.machines import HARDWARE
from tests.patience import PATIENCE
from tests.unit.virtman.scene import BOOT, MIB, Scene
from tests.unit.virtman.test_cut_off import CutOff
from tests.unit.virtman.test_streams import receive, sent
from virtman import attaching, booting, copies, creating, disks, migration, renaming, streams
from virtman.errors import BadRequest, BadStream, CallerGone, Conflict, HypervisorError, VirtmanError, VmMoving, VmRuns
from virtman.models import MigrationSource
from virtman.names import TRAVELLING
from virtman.records import MIGRATE

THERE = "qemu+ssh://there/system"
TRAVELLER = MigrationSource(uuid=uuid.uuid4(), **BOOT.model_dump(), seed="c2VlZA==", hardware=HARDWARE)
SENT = "virtman-migration-2-x"


def a_vm(scene: Scene) -> None:
    """One that runs."""
    scene.volt.offer("debian", size=MIB)
    booting.boot(scene.vms, "vm", "debian", None, BOOT, [], None)
    scene.host.disks["vm"].writes = "precious"
    creating.create(scene.vms, "disk", "debian", None)
    disks.take(scene.vms, "vm", SENT)


def a_disk(scene: Scene) -> None:
    """What has come of a VM's disk."""
    scene.volt.offer("debian", size=MIB)
    creating.create(scene.vms, "vm", "debian", None)
    disks.take(scene.vms, "vm", "migration-0")


def arriving(scene: Scene) -> None:
    """As before, and its memory has come."""
    a_disk(scene)
    migration.expect(scene.vms, "vm", TRAVELLER)
    scene.machines.come("vm")
    last = scene.vms.record("vm").settled(whole=True)
    scene.vm_shelf.put("vm", last)


def leave(scene: Scene, vm: str = "vm", tell: Callable[[int, int], None] = lambda _done, _total: None) -> float:
    """Move a VM away."""
    scene.machines.others.setdefault(THERE, there(scene).machines)
    return migration.leave(scene.vms, vm, THERE, "<domain/>", SENT, tell)


def went(scene: Scene) -> None:
    """A VM that has moved away."""
    a_vm(scene)
    leave(scene)


def there(here: Scene) -> Scene:
    """Another host that expects the VM."""
    scene = Scene(here.test)
    a_disk(scene)
    migration.expect(scene.vms, "vm", TRAVELLER)
    return scene


class LeaveTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(self)
        a_vm(self.scene)

    def assert_stays(self) -> None:
        self.assertIn("vm", self.scene.machines.running)
        self.assertIsNone(self.scene.vms.record("vm").moved)
        booting.start(self.scene.vms, "vm")
        self.scene.check(self)

    def assert_went(self) -> None:
        record = self.scene.vms.record("vm")
        self.assertEqual((THERE, True), (record.moved, record.steady))
        self.assertNotIn("vm", self.scene.machines.defined)
        for act in (
            lambda: booting.start(self.scene.vms, "vm"),
            lambda: booting.boot(self.scene.vms, "vm", "debian", None, BOOT, [], None),
            lambda: leave(self.scene),
            lambda: renaming.rename(self.scene.vms, "vm", "new"),
            lambda: disks.resize(self.scene.vms, "vm", 2 * MIB),
            lambda: disks.take(self.scene.vms, "vm", "snapshot"),
            lambda: disks.drop(self.scene.vms, "vm", "snapshot"),
            lambda: disks.revert(self.scene.vms, "vm", f"{TRAVELLING}0"),
            lambda: attaching.attach(self.scene.vms, "vm", "disk"),
            lambda: creating.clone(self.scene.vms, "vm", ["clone"]),
            lambda: copies.content_of_vm(self.scene.vms, "vm").__enter__(),
        ):
            self.assertThat(str(self.assertRaises(VmMoving, act)), Contains(f"went to {THERE}"))
        self.assertEqual("precious", self.scene.host.disks["vm"].writes)

    def test_a_vm_that_went_is_not_started_here(self) -> None:
        self.assertEqual(0.5, leave(self.scene))
        self.assert_went()
        creating.destroy(self.scene.vms, "vm")
        self.assertEqual({"disk"}, set(self.scene.host.disks))

    def test_one_that_went_is_sent_by_snapshots_of_the_agents_own(self) -> None:
        leave(self.scene)
        disks.take(self.scene.vms, "vm", f"{TRAVELLING}1")
        written = list[bytes]()
        streams.send(self.scene.vms, "vm", None, SENT, written.append, lambda *_: None)
        self.assertNotEqual([], written)
        for name in (SENT, f"{TRAVELLING}1"):
            disks.drop(self.scene.vms, "vm", name)
        self.assertEqual((), self.scene.vms.record("vm").snapshots)

    def test_one_that_went_is_not_taken_back_by_who_ends_its_migration(self) -> None:
        leave(self.scene)
        migration.abort(self.scene.vms, "vm")
        self.assertRaises(BadRequest, migration.take_back, self.scene.vms, "vm", "qemu+ssh://another/system")
        self.assert_went()

    def test_one_that_is_taken_back_is_started(self) -> None:
        leave(self.scene)
        migration.take_back(self.scene.vms, "vm", THERE)
        booting.start(self.scene.vms, "vm")
        self.assert_stays()

    def test_what_cannot_go(self) -> None:
        scene = self.scene
        booting.boot(scene.vms, "off", "debian", None, BOOT, [], None)
        scene.machines.stop("off", force=True)
        booting.boot(scene.vms, "with", "debian", None, BOOT, [], None)
        attaching.attach(scene.vms, "with", "disk")
        booting.boot(scene.vms, "tree", "debian", None, BOOT, [], None)
        scene.machines.stop("tree", force=True)
        for snapshot in ("a", "b"):
            disks.take(scene.vms, "tree", snapshot)
        disks.revert(scene.vms, "tree", "a")
        booting.start(scene.vms, "tree")
        cases: list[tuple[str, type[VirtmanError], str]] = [
            ("disk", Conflict, "never booted"),
            ("off", BadRequest, "is off"),
            ("with", BadRequest, "'disk'"),
            ("tree", BadRequest, "'b'"),
        ]
        for vm, error, said in cases:
            self.assertThat(str(self.assertRaises(error, migration.migration_source, scene.vms, vm)), Contains(said))
            self.assertRaises(error, leave, scene, vm)
        self.assertRaises(BadRequest, migration.abort, scene.vms, "vm")

    def test_what_fails_leaves_it_here(self) -> None:
        def hung_up(_done: int, _total: int) -> None:
            raise CallerGone("he hung up")

        def off(_done: int, _total: int) -> None:
            self.scene.machines.stop("vm", force=True)

        for tell, error in ((hung_up, CallerGone), (off, HypervisorError)):
            self.assertRaises(error, leave, self.scene, tell=tell)
            self.assertTrue(self.scene.vms.record("vm").steady)
            self.assertIsNone(self.scene.vms.record("vm").moved)
            booting.start(self.scene.vms, "vm")
            self.assert_stays()

    def test_one_of_which_libvirt_does_not_say_that_it_went(self) -> None:
        self.scene.machines.failing["migrate's answer"] = HypervisorError("away")
        self.assertEqual(0.0, leave(self.scene))
        self.assert_went()

    def test_while_nobody_knows_where_it_is_it_is_not_started(self) -> None:
        failing = self.scene.machines.failing
        failing |= {"migrate's answer": HypervisorError("away"), "end_migration": HypervisorError("away")}
        self.assertRaises(HypervisorError, leave, self.scene)
        self.assertTrue(self.scene.vms.record("vm").doing(MIGRATE))
        self.assertRaises(HypervisorError, booting.start, self.scene.vms, "vm")
        failing.clear()
        self.scene.machines.gone["vm"] = None  # libvirt does not know any more: the VM counts as gone
        disks.repair(self.scene.vms, "vm")
        self.assert_went()

    def test_one_whose_disk_is_not_what_was_sent(self) -> None:
        changes: list[Callable[[Scene], object]] = [
            lambda scene: disks.take(scene.vms, "vm", "nightly"),
            lambda scene: disks.resize(scene.vms, "vm", 2 * MIB),
            lambda scene: disks.drop(scene.vms, "vm", SENT),
        ]
        for change in changes:
            scene = self.scene = Scene(self)
            a_vm(scene)
            change(scene)
            self.assertRaises(Conflict, leave, scene)
            self.assert_stays()

    def test_a_move_that_is_under_way_is_ended_by_another_call(self) -> None:
        ended = threading.Event()
        aborting = threading.Thread(target=migration.abort, args=[self.scene.vms, "vm"], daemon=True)

        def abort(_done: int, _total: int) -> None:
            aborting.start()
            ended.wait(PATIENCE)

        self.scene.machines.moment = lambda what: ended.set() if what == "after machines.end_migration" else None
        error = self.assertRaises(HypervisorError, leave, self.scene, tell=abort)
        aborting.join(PATIENCE)
        self.assertEqual("it was ended", str(error))
        self.assert_stays()

    def test_one_whose_disk_is_a_device_of_the_host_stays(self) -> None:
        self.scene.vms.vmdisks.moves_live = False
        for act in (lambda: migration.migration_source(self.scene.vms, "vm"), lambda: leave(self.scene)):
            self.assertRaises(NotPossible, act)
        self.assertIn("vm", self.scene.machines.running)

    def test_it_is_moved_once_at_a_time(self) -> None:
        said = list[str]()

        def again(done: int, total: int) -> None:
            said.append(str(self.assertRaises(VmMoving, migration.migration_source, self.scene.vms, "vm")))

        leave(self.scene, tell=again)
        self.assertThat(said[0], Contains("is being moved"))

    def test_only_one_that_went_there_is_destroyed_in_the_end(self) -> None:
        self.assertRaises(VmMoving, migration.finish, self.scene.vms, "vm", THERE)
        leave(self.scene)
        self.assertRaises(VmMoving, migration.finish, self.scene.vms, "vm", "qemu+ssh://another/system")
        self.assert_went()
        migration.finish(self.scene.vms, "vm", THERE)
        self.assertEqual({"disk"}, set(self.scene.host.disks))


class ArriveTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(self)

    def test_it_goes_on_when_all_has_come(self) -> None:
        arriving(self.scene)
        for _ in range(2):
            migration.arrive(self.scene.vms, "vm")
        self.assertEqual((set(), {"vm"}), (self.scene.machines.paused, set(self.scene.machines.running)))
        self.scene.check(self)
        disks.take(self.scene.vms, "vm", "snapshot")

    def test_nothing_is_done_with_it_before(self) -> None:
        arriving(self.scene)
        acts: list[Callable[[], object]] = [
            lambda: booting.start(self.scene.vms, "vm"),
            lambda: disks.take(self.scene.vms, "vm", "snapshot"),
            lambda: disks.drop(self.scene.vms, "vm", "migration-0"),
            lambda: disks.revert(self.scene.vms, "vm", "migration-0"),
            lambda: disks.resize(self.scene.vms, "vm", 2 * MIB),
            lambda: creating.clone(self.scene.vms, "vm", ["clone"]),
            lambda: copies.content_of_vm(self.scene.vms, "vm").__enter__(),
        ]
        for act in acts:
            self.assertThat(str(self.assertRaises(VmMoving, act)), Contains("is arriving"))
        self.assertEqual({"vm"}, self.scene.machines.paused)
        creating.destroy(self.scene.vms, "vm")
        self.assertEqual(({}, {}), (self.scene.host.disks, self.scene.machines.running))

    def test_one_whose_memory_has_not_come(self) -> None:
        a_disk(self.scene)
        for _ in range(2):
            migration.expect(self.scene.vms, "vm", TRAVELLER)
        self.scene.vm_shelf.put("vm", self.scene.vms.record("vm").settled(whole=True))
        said = str(self.assertRaises(VmMoving, migration.arrive, self.scene.vms, "vm"))
        self.assertThat(said, Contains("does not have its memory"))

    def test_one_whose_last_writes_have_not_come(self) -> None:
        arriving(self.scene)
        self.scene.vm_shelf.put("vm", self.scene.vms.record("vm").settled(whole=False))
        self.assertThat(
            str(self.assertRaises(VmMoving, migration.arrive, self.scene.vms, "vm")), Contains("what it wrote last")
        )
        self.assertEqual({"vm"}, self.scene.machines.paused)

    def test_what_has_come_is_given_up(self) -> None:
        def give_up() -> str:
            return migration.give_up(self.scene.vms, "vm", ["another", "migration-0"])

        self.assertEqual("absent", give_up())
        for come in (a_disk, arriving):
            scene = self.scene = Scene(self)
            come(scene)
            self.assertEqual("another", migration.give_up(scene.vms, "vm", ["another"]))
            self.assertIn("vm", scene.host.disks)
            self.assertEqual(["given up", "absent"], [give_up(), give_up()])
            self.assertEqual(({}, {}), (scene.host.disks, scene.machines.running))

    def test_what_goes_on_is_not_given_up(self) -> None:
        arriving(self.scene)
        migration.arrive(self.scene.vms, "vm")
        self.assertEqual("arrived", migration.give_up(self.scene.vms, "vm", ["migration-0"]))
        self.scene.check(self)

    def test_what_is_attached_to_another_vm_is_neither_given_up_nor_becomes_a_vm(self) -> None:
        a_disk(self.scene)
        booting.boot(self.scene.vms, "user", "debian", None, BOOT, [], None)
        attaching.attach(self.scene.vms, "user", "vm")
        self.assertRaises(Conflict, migration.give_up, self.scene.vms, "vm", ["migration-0"])
        self.assertRaises(Conflict, migration.expect, self.scene.vms, "vm", TRAVELLER)
        self.assertIn("vm", self.scene.host.disks)
        self.scene.check(self)

    def test_a_vm_that_is_there_is_not_overwritten(self) -> None:
        a_vm(self.scene)
        self.assertRaises(VmRuns, migration.expect, self.scene.vms, "vm", TRAVELLER)
        self.scene.check(self)


class MigrationCutOffTest(CutOff):
    def test_a_vm_is_here_or_there(self) -> None:
        def either(scene: Scene) -> None:
            other = scene.machines.others[THERE]
            here, gone = "vm" in scene.machines.running, "vm" in other.running
            self.assertEqual(1, here + gone)
            self.assertEqual(THERE if gone else None, scene.vms.record("vm").moved)
            self.assertTrue(scene.vms.record("vm").steady)
            if here:
                scene.check(self)

        moments = self.cut_and_restart(a_vm, leave, either)
        self.assertEqual(set(), {"migrate:recorded", "migrate:went", "migrate:settled"} - set(moments))

    def test_what_was_made_ready_for_it_goes_with_it(self) -> None:
        seen = list[str | None]()
        while None not in seen:
            scene = Scene(self)
            a_disk(scene)
            seen.append(scene.cut(lambda scene: migration.expect(scene.vms, "vm", TRAVELLER), len(seen) + 1))
            scene.restart()
            creating.destroy(scene.vms, "vm")
            self.assertEqual(({}, set()), (scene.host.disks, scene.machines.files), str(seen))
        self.assertIn("after machines.expect", seen)

    def test_it_arrives_when_asked_again(self) -> None:
        def arrives(scene: Scene) -> None:
            record = scene.vms.record("vm")
            self.assertEqual(record.arriving, "vm" in scene.machines.paused)
            migration.arrive(scene.vms, "vm")
            self.assertEqual(set(), scene.machines.paused)
            scene.check(self)

        moments = self.cut_and_restart(arriving, lambda scene: migration.arrive(scene.vms, "vm"), arrives)
        self.assertEqual(set(), {"arrive:recorded", "arrive:goes on", "arrive:done"} - set(moments))


class LastStreamTest(TestCase):
    def test_a_vm_that_arrives_gets_what_it_wrote_last_and_no_snapshot_nor_other_size(self) -> None:
        here, other = Scene(self), Scene(self)
        a_vm(here)
        disks.take(here.vms, "vm", "first")
        other.volt.offer("debian", size=MIB)
        receive(other, sent(here, "first"))
        migration.expect(other.vms, "vm", TRAVELLER)
        other.machines.come("vm")
        here.host.disks["vm"].writes = "what came last"
        last = sent(here, None, "first")
        other.host.spare = 0  # it is what a VM wrote
        for _ in range(2):
            self.assertRaises(BadStream, receive, other, last[:-10])
            self.assertFalse(other.vms.record("vm").whole)
            receive(other, last)
            self.assertTrue(other.vms.record("vm").whole)
        self.assertEqual("what came last", other.host.disks["vm"].writes)
        disks.take(here.vms, "vm", "second")
        with_snapshot = sent(here, "second", "first")
        disks.drop(here.vms, "vm", "second")
        disks.resize(here.vms, "vm", 2 * MIB)
        for misfit in (with_snapshot, sent(here, None, "first")):
            self.assertRaises(Conflict, receive, other, misfit)
        self.assertEqual(["first"], [snapshot.name for snapshot in other.vms.record("vm").snapshots])
        self.assertEqual((MIB, MIB), (other.vms.record("vm").size, other.host.disks["vm"].size))
