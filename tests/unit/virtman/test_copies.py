"""What is copied stays there meanwhile."""

from __future__ import annotations

from testtools import TestCase

from tests.unit.virtman.agents import Site
from tests.unit.virtman.scene import Scene
from virtman import creating
from virtman.errors import UnknownImage

MIB = 1 << 20


class ImageTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(self)
        self.scene.volt.offer("debian", size=MIB)
        self.copies = self.scene.copies

    def test_it_is_read_until_the_last_copy_has_ended(self) -> None:
        with self.copies.image("debian"):
            with self.copies.image("debian") as content:
                self.assertEqual(("image debian", MIB), (content.name, content.size))
                self.assertTrue(self.copies.reads("debian"))
            self.assertTrue(self.copies.reads("debian"))
            self.assertFalse(self.copies.reads("other"))
        self.assertFalse(self.copies.reads("debian"))

    def test_one_that_is_not_there_is_not_read(self) -> None:
        self.assertRaises(UnknownImage, self.copies.image("other").__enter__)
        self.assertFalse(self.copies.reads("other"))


class VmTest(ImageTest):
    def test_its_image_is_read_also_if_the_vm_is_destroyed(self) -> None:
        creating.create(self.scene.vms, "vm", "debian", None)
        with self.copies.vm("vm"):
            creating.destroy(self.scene.vms, "vm")
            self.assertTrue(self.copies.reads("debian"))
        self.assertFalse(self.copies.reads("debian"))


class GcTest(TestCase):
    def test_the_stack_of_an_image_that_is_copied_stays(self) -> None:
        site = Site(self)
        site.volt.offer("debian", size=MIB)
        agent = site.agent()
        with agent.copies.image("debian"):
            self.assertEqual([], agent.cleaning.gc().stacks)
            self.assertIn("debian", site.host.served)
        self.assertEqual(["debian"], agent.cleaning.gc().stacks)
