"""The agent is cut off at every moment of every operation; the next start finishes or undoes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import count
from pathlib import Path

from testtools import TestCase

from tests.doubles.volt import child, parent
from tests.unit.virtman.scene import BOOT, Scene
from virtman import booting, creating, disks, following, hosting, origins, serving
from virtman.errors import OriginChanged
from virtman.inplace import to_publish
from virtman.records import FROZEN

Act = Callable[[Scene], object]

FEWEST_MOMENTS = 3


def offered(scene: Scene) -> None:
    """An image is published by another host; nothing of it is here."""
    scene.volt.offer("debian")


def attached(scene: Scene) -> None:
    """A VM of the image is here and has written to its disk."""
    offered(scene)
    creating.create(scene.vms, "old", "debian", None)
    scene.host.disks["old"].writes = "precious"


def two_vms(scene: Scene) -> None:
    """Two VMs are here; the second is known to the hypervisor."""
    attached(scene)
    booting.boot(scene.vms, "vm", "debian", 1 << 30, BOOT, [], None)


def publish_in_place(scene: Scene) -> None:
    """An image whose content stays where it is."""
    origins.add_origin(scene.stacks, *scene.put_in_place("mine"))


def publish_copy(scene: Scene) -> None:
    """An image whose content is in the store."""
    origins.add_origin(scene.stacks, scene.put_content("mine"))


def create(scene: Scene) -> None:
    creating.create(scene.vms, "vm", "debian", 1 << 30)


class CutOff(TestCase):
    """What cutting off takes."""

    def cut_everywhere(self, given: Act, act: Act, then: Act) -> list[str]:
        """Cut the act off at its first moment, at its second, …; each time on a new host, restarted and checked."""

        def check_and_then(scene: Scene) -> None:
            scene.check(self)
            then(scene)

        return self.cut_and_restart(given, act, check_and_then)

    def cut_and_restart(self, given: Act, act: Act, then: Act) -> list[str]:
        """As ``cut_everywhere``, where only the test knows what is right after the restart."""
        moments: list[str] = []
        for number in count(1):
            scene = Scene(self)
            given(scene)
            moment = scene.cut(act, number)
            if moment is None:
                break
            moments.append(moment)
            try:
                scene.restart()
                then(scene)
            except BaseException as error:
                error.add_note(f"cut off at moment {number}: {moment}")
                raise
        self.assertGreater(len(moments), FEWEST_MOMENTS)
        return moments


class WithdrawnTest(CutOff):
    def let_go(self, scene: Scene) -> None:
        for name in ("mine", "debian"):
            hosting.remove_withdrawn(scene.stacks, name)

    def test_what_is_withdrawn_goes_in_the_end(self) -> None:
        def given(scene: Scene) -> None:
            attached(scene)
            creating.destroy(scene.vms, "old")
            origins.add_origin(scene.stacks, scene.put_content("mine"))
            for name in ("mine", "debian"):
                scene.volt.remove_image(name, when_unused=True)

        def then(scene: Scene) -> None:
            self.let_go(scene)
            scene.check_empty(self)
            self.assertNotIn("mine", scene.volt.images)

        self.cut_everywhere(given, self.let_go, then)


class DevicesTest(CutOff):
    """A file that says a number stands for a device."""

    def device(self, scene: Scene) -> Path:
        path = scene.folder / "disk"
        path.write_text("8:16")
        return path

    def attach(self, scene: Scene) -> None:
        scene.devices.attach(self.device(scene))

    def test_attach_is_undone_or_done_and_can_be_asked_for_again(self) -> None:
        def again(scene: Scene) -> None:
            self.attach(scene)
            scene.check(self)
            self.assertEqual(1, len(scene.host.devices))

        moments = self.cut_everywhere(lambda _scene: None, self.attach, again)
        self.assertIn("within cache.attach_device", moments)

    def test_detach_is_finished(self) -> None:
        def detach(scene: Scene) -> None:
            scene.devices.detach(self.device(scene))

        def gone(scene: Scene) -> None:
            detach(scene)  # cut off before anything was recorded
            self.assertEqual({}, scene.host.leftovers())

        moments = self.cut_everywhere(self.attach, detach, gone)
        self.assertIn("detach-device:detached", moments)


class CutOffTest(CutOff):
    def old_vm_is_intact(self, scene: Scene) -> None:
        self.assertEqual("precious", scene.host.disks["old"].writes)
        self.assertIn("debian", scene.host.served)

    def nothing_but_perhaps_a_stack(self, scene: Scene) -> None:
        hosting.remove_if_idle(scene.stacks, "debian")
        scene.check_empty(self)

    def test_create_of_the_first_vm_is_undone(self) -> None:
        moments = self.cut_everywhere(offered, create, self.nothing_left_or_done)
        self.assertIn("attach:joined", moments)
        self.assertIn("within snapshot.create", moments)

    def nothing_left_or_done(self, scene: Scene) -> None:
        if scene.vms.records.get("vm") is not None:  # cut off after the last act: the VM is there
            creating.destroy(scene.vms, "vm")
        self.nothing_but_perhaps_a_stack(scene)

    def test_the_vm_that_was_there_is_left_alone(self) -> None:
        def dead(scene: Scene) -> None:
            attached(scene)
            scene.host.daemon_dies("debian")

        acts: list[tuple[Act, Act]] = [
            (attached, create),
            (dead, lambda scene: serving.restore(scene.stacks, "debian")),
            (attached, lambda scene: serving.suspend(scene.stacks, "debian")),
        ]
        for given, act in acts:
            self.cut_everywhere(given, act, self.old_vm_is_intact)

    def test_destroy_is_finished_and_other_vms_stay(self) -> None:
        def gone(scene: Scene) -> None:
            self.old_vm_is_intact(scene)
            if scene.vms.records.get("vm") is not None:  # cut off before anything was recorded
                creating.destroy(scene.vms, "vm")
            self.assertEqual({"old"}, set(scene.host.disks))
            self.assertEqual({}, scene.machines.running)

        moments = self.cut_everywhere(two_vms, lambda scene: creating.destroy(scene.vms, "vm"), gone)
        self.assertIn("destroy:deleted", moments)

    def test_a_boot_of_a_new_vm_is_finished_or_undone(self) -> None:
        def nothing_or_all(scene: Scene) -> None:
            self.old_vm_is_intact(scene)
            vm = scene.vms.records.get("vm")
            self.assertEqual(vm is not None and vm.boot is not None, "vm" in scene.machines.running)
            if vm is not None:
                creating.destroy(scene.vms, "vm")
            self.assertEqual(({"old"}, {}), (set(scene.host.disks), scene.machines.running))

        moments = self.cut_everywhere(
            attached, lambda s: booting.boot(s.vms, "vm", "debian", None, BOOT, [], None), nothing_or_all
        )
        self.assertIn("after machines.start", moments)

    def test_a_boot_of_a_disk_that_was_there_never_costs_the_disk(self) -> None:
        def precious(scene: Scene) -> None:
            self.assertEqual("precious", scene.host.disks["old"].writes)

        self.cut_everywhere(
            attached, lambda scene: booting.boot(scene.vms, "old", "debian", None, BOOT, [], None), precious
        )

    def test_detach_is_finished(self) -> None:
        def given(scene: Scene) -> None:
            offered(scene)
            hosting.ensure(scene.stacks, "debian")

        self.cut_everywhere(
            given, lambda s: hosting.remove_if_idle(s.stacks, "debian"), self.nothing_but_perhaps_a_stack
        )

    def test_follow_ends_with_the_new_parents_alone(self) -> None:
        def follow(scene: Scene) -> None:
            following.follow(scene.stacks, scene.volt.assign("debian", ["new", "other"], ["child"]))

        def reads_what_the_record_says(scene: Scene) -> None:
            self.old_vm_is_intact(scene)
            following.follow(scene.stacks, scene.volt.places["debian"])
            scene.check(self)
            self.assertEqual({parent("new")}, scene.host.reading["debian"])
            self.assertEqual([child("child")], scene.host.allowed["debian"])

        self.cut_everywhere(attached, follow, reads_what_the_record_says)

    def test_reboot_during_create_is_repaired(self) -> None:
        def all_processes_end(scene: Scene) -> None:
            scene.host.served.clear()
            scene.host.reading.clear()
            scene.host.open_caches.clear()
            scene.restart()
            scene.check(self)

        self.cut_everywhere(attached, create, all_processes_end)

    def test_publish_is_finished_or_undone(self) -> None:
        for publish in (publish_copy, publish_in_place):

            def again(scene: Scene, publish: Act = publish) -> None:
                if scene.stacks.records.get("mine") is None:
                    publish(scene)
                scene.check(self)
                self.assertEqual({"mine"}, set(scene.host.served))

            self.assertIn("after volt.publish", self.cut_everywhere(lambda _scene: None, publish, again))

    def test_removal_of_an_origin_is_finished_and_its_file_left_as_it_was(self) -> None:
        def drop(scene: Scene) -> None:
            origins.drop_origin(scene.stacks, "mine")

        def drop_again(scene: Scene) -> None:
            files = {path: path.stat() for path in scene.folder.glob("*.raw")}
            drop(scene)
            scene.check_empty(self)
            self.assertEqual(files, {path: path.stat() for path in scene.folder.glob("*.raw")})

        for publish in (publish_copy, publish_in_place):

            def given(scene: Scene, publish: Act = publish) -> None:
                publish(scene)
                scene.volt.images.clear()
                scene.volt.places.clear()

            self.cut_and_restart(given, drop, drop_again)

    def test_what_takes_the_place_of_what_is_in_place_does_so_or_not(self) -> None:
        def given(scene: Scene) -> None:
            publish_in_place(scene)
            scene.put_in_place("other")

        def other(scene: Scene) -> None:
            with to_publish(scene.folder / "other.raw", []) as (found, _fd):
                origins.add_origin(scene.stacks, scene.record("mine").image, found)

        def one_of_them(scene: Scene) -> None:
            scene.check(self)
            self.assertEqual({}, scene.troubles)
            other(scene)
            scene.check(self)

        self.cut_and_restart(given, other, one_of_them)

    def test_what_changed_in_place_is_not_served_wherever_that_is_cut_off(self) -> None:
        def given(scene: Scene) -> None:
            publish_in_place(scene)
            (scene.folder / "mine.raw").write_bytes(bytes(1 << 20))

        def look(scene: Scene) -> None:
            with contextlib.suppress(OriginChanged):
                serving.check_in_place(scene.stacks, scene.record("mine"))

        def not_served(scene: Scene) -> None:
            self.assertEqual({}, scene.host.leftovers())
            self.assertIn("has changed", scene.troubles["image mine"])

        self.cut_and_restart(given, look, not_served)


def with_snapshots(scene: Scene) -> None:
    """A VM that runs, with an agent in its guest and two snapshots."""
    two_vms(scene)
    scene.machines.with_agents.add("vm")
    for name in ("one", "two"):
        scene.host.disks["vm"].writes = name
        disks.take(scene.vms, "vm", name)
    scene.host.disks["vm"].writes = "now"


def switched_off(scene: Scene) -> None:
    """The same, off: nobody has booted it."""
    attached(scene)
    for name in ("one", "two"):
        scene.host.disks["old"].writes = name
        disks.take(scene.vms, "old", name)
    scene.host.disks["old"].writes = "now"


class DiskCutOffTest(CutOff):
    def test_a_snapshot_is_taken_or_was_never_asked_for(self) -> None:
        def all_or_nothing(scene: Scene) -> None:
            snapshots = [snapshot.name for snapshot in scene.vms.record("vm").snapshots]
            self.assertIn(snapshots, (["one", "two"], ["one", "two", "tri"]))
            self.assertEqual({FROZEN}, {snapshot.state for snapshot in scene.vms.record("vm").snapshots})
            self.assertEqual("now", scene.host.disks["vm"].writes)
            self.assertEqual(("one", 1 << 30), scene.host.disks["vm"].snapshots["one"])

        moments = self.cut_everywhere(with_snapshots, lambda scene: disks.take(scene.vms, "vm", "tri"), all_or_nothing)
        self.assertTrue({"after machines.freeze", "take-snapshot:taken"} <= set(moments), str(moments))

    def test_going_back_is_finished(self) -> None:
        def then_or_now(scene: Scene) -> None:
            record, disk = scene.vms.record("old"), scene.host.disks["old"]
            self.assertIn((record.current, disk.writes), (("two", "now"), ("one", "one")))

        moments = self.cut_everywhere(switched_off, lambda scene: disks.revert(scene.vms, "old", "one"), then_or_now)
        self.assertIn("revert:reverted", moments)

    def test_a_snapshot_is_dropped_whole(self) -> None:
        def gone_or_there(scene: Scene) -> None:
            self.assertIn("two", scene.host.disks["vm"].snapshots)
            self.assertEqual("now", scene.host.disks["vm"].writes)

        moments = self.cut_everywhere(with_snapshots, lambda scene: disks.drop(scene.vms, "vm", "one"), gone_or_there)
        self.assertIn("delete-snapshot:dropped", moments)

    def test_a_disk_has_the_new_size_or_the_old_one(self) -> None:
        def grown_or_not(scene: Scene) -> None:
            self.assertIn(scene.vms.record("vm").size, (1 << 30, 2 << 30))

        moments = self.cut_everywhere(
            with_snapshots, lambda scene: disks.resize(scene.vms, "vm", 2 << 30), grown_or_not
        )
        self.assertIn("resize:resized", moments)

    def test_clones_are_there_whole_or_not_at_all(self) -> None:
        def whole(scene: Scene) -> None:
            clones = {name: disk.writes for name, disk in scene.host.disks.items() if name.startswith("new")}
            self.assertEqual({"now"}, {*clones.values(), "now"})
            self.assertEqual({"one", "two"}, set(scene.host.disks["vm"].snapshots))
            creating.clone(scene.vms, "vm", ["new-1", "new-2"])
            self.assertEqual({"new-1", "new-2"}, {name for name in scene.host.disks if name.startswith("new")})
            scene.check(self)

        moments = self.cut_everywhere(
            with_snapshots, lambda scene: creating.clone(scene.vms, "vm", ["new-1", "new-2"]), whole
        )
        self.assertTrue(
            {"take-snapshot:done", "within snapshot.clone", "delete-snapshot:dropped"} <= set(moments), str(moments)
        )
