"""The stack of what is copied stays meanwhile."""

from __future__ import annotations

from testtools import TestCase

from tests.unit.virtman.agents import MIB
from tests.unit.virtman.scene import Scene
from virtman import copies, creating
from virtman.errors import UnknownImage


class CopiesTest(TestCase):
    def test_an_image_is_in_use_until_its_last_copy_has_ended(self) -> None:
        scene = Scene(self)
        scene.volt.offer("debian", size=MIB)
        with copies.content_of_image(scene.stacks, "debian"):
            with copies.content_of_image(scene.stacks, "debian") as content:
                self.assertEqual(("image debian", MIB), (content.name, content.size))
            self.assertEqual([True, False], [scene.stacks.in_use(image) for image in ("debian", "other")])
        self.assertFalse(scene.stacks.in_use("debian"))
        creating.create(scene.vms, "vm", "debian", None)
        with copies.content_of_vm(scene.vms, "vm"):
            creating.destroy(scene.vms, "vm")
            self.assertTrue(scene.stacks.in_use("debian"))
        self.assertFalse(scene.stacks.in_use("debian"))

    def test_an_unknown_image_is_not_in_use(self) -> None:
        scene = Scene(self)
        self.assertRaises(UnknownImage, copies.content_of_image(scene.stacks, "other").__enter__)
        self.assertFalse(scene.stacks.in_use("other"))
