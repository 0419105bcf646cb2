"""The disk with the state is full, from each write of a record on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from unittest import mock

from testtools import TestCase

from drivers.errors import DriverError
from tests.unit.virtman.scene import BOOT, Scene
from virtman import booting, creating, following, hosting, origins
from virtman.errors import HostTrouble, NoRoom

Act = Callable[[Scene], object]


class FullDisk(TestCase):
    """What a full disk takes."""

    def full_from_each_write_on(self, given: Act, act: Act) -> list[Scene]:
        """Scenes after the act, in which the disk was full from its first write on, from its second on, …

        In each of them the act failed, and said why; the last one, in which it did not need the room, is left out.
        """
        scenes = []
        for number in count():
            scene = Scene(self)
            given(scene)
            scene.fill_up(after=number)
            try:
                act(scene)
            except NoRoom as error:
                self.assertIn("make room", str(error))
                scenes.append(scene)
            else:
                return scenes
        raise AssertionError


def created(scene: Scene) -> None:
    """A VM is here that was never booted."""
    scene.volt.offer("debian")
    creating.create(scene.vms, "vm", "debian", None)


class NoRoomTest(FullDisk):
    def test_a_create_fails_and_leaves_nothing(self) -> None:
        scenes = self.full_from_each_write_on(
            lambda scene: scene.volt.offer("debian"), lambda scene: creating.create(scene.vms, "vm", "debian", None)
        )
        self.assertEqual(5, len(scenes), "the records of VM and stack are written so often")
        for scene in scenes:
            self.assertEqual({}, scene.host.disks)
            self.assertEqual([], scene.vm_shelf.names())
            hosting.remove_if_idle(scene.stacks, "debian")
            scene.check_empty(self)

    def test_a_boot_fails_and_leaves_what_there_was(self) -> None:
        scenes = self.full_from_each_write_on(
            created, lambda s: booting.boot(s.vms, "vm", "debian", None, BOOT, [], None)
        )
        self.assertEqual(1, len(scenes))
        for scene in scenes:
            scene.check(self)

    def test_a_publish_fails_and_is_not_published_or_goes_on_when_there_is_room(self) -> None:
        def publish(scene: Scene) -> None:
            origins.add_origin(scene.stacks, scene.put_content("mine"))

        *before, after = self.full_from_each_write_on(lambda _scene: None, publish)
        for scene in before:
            scene.check_empty(self)
        self.assertIn("mine", after.volt.images, "Volt has it")
        self.assertIn("mine", after.host.served)
        after.make_room()
        after.restart()
        after.check(self)

    def test_new_parents_are_followed_when_there_is_room(self) -> None:
        def given(scene: Scene) -> None:
            created(scene)
            scene.volt.assign("debian", ["new"])

        scenes = self.full_from_each_write_on(
            given, lambda scene: following.follow(scene.stacks, scene.volt.places["debian"])
        )
        self.assertEqual(2, len(scenes))
        for scene in scenes:
            self.assertIn("debian", scene.host.served)
            scene.make_room()
            following.follow(scene.stacks, scene.volt.places["debian"])
            scene.check(self)

    def test_destroying_makes_room_and_needs_none(self) -> None:
        scene = Scene(self)
        scene.volt.offer("debian")
        booting.boot(scene.vms, "vm", "debian", None, BOOT, [], None)
        scene.fill_up()
        creating.destroy(scene.vms, "vm")
        self.assertEqual({}, scene.machines.running)
        self.assertTrue(hosting.remove_if_idle(scene.stacks, "debian"))
        scene.check_empty(self)

    def test_what_is_destroyed_by_half_and_cannot_be_recorded_is_destroyed_later(self) -> None:
        for error in (NoRoom("no space left"), HostTrouble("the disk has errors")):
            scene = Scene(self)
            created(scene)
            self.patch(scene.vm_shelf, "put", mock.Mock(side_effect=error))
            scene.host.failing = {"snapshot.delete": DriverError("stuck")}
            self.assertRaises(DriverError, creating.destroy, scene.vms, "vm")
            scene.host.failing = {}
            scene.repair()
            self.assertEqual(([], {}), (scene.vm_shelf.names(), scene.host.disks))

    def test_dropping_an_origin_makes_room_and_needs_none(self) -> None:
        scene = Scene(self)
        origins.add_origin(scene.stacks, scene.put_content("mine"))
        scene.volt.remove_image("mine")
        scene.fill_up()
        self.assertTrue(origins.drop_origin(scene.stacks, "mine"))
        scene.check_empty(self)
