"""The pure parts of the guest's build."""

from __future__ import annotations

import lzma
import tempfile
from pathlib import Path

import testtools

from lab.guest import copy_modules, lacks_release, load_order, recipe_hash

MODULES_DEP = """\
kernel/virtio_blk.ko: kernel/virtio.ko kernel/virtio_ring.ko
kernel/virtio.ko: kernel/virtio_ring.ko
kernel/virtio_ring.ko:
kernel/virtio-pci.ko.xz: kernel/virtio.ko kernel/virtio_ring.ko
"""


class LoadOrderTest(testtools.TestCase):
    def test_a_module_follows_all_that_it_needs(self) -> None:
        order = load_order(MODULES_DEP, ["virtio_blk"])
        self.assertEqual(["kernel/virtio_ring.ko", "kernel/virtio.ko", "kernel/virtio_blk.ko"], order)

    def test_what_two_modules_need_is_loaded_once(self) -> None:
        order = load_order(MODULES_DEP, ["virtio_blk", "virtio_pci"])
        self.assertEqual(len(set(order)), len(order))
        self.assertEqual("kernel/virtio-pci.ko.xz", order[-1])

    def test_a_driver_that_is_built_into_the_kernel_needs_no_module(self) -> None:
        self.assertEqual([], load_order(MODULES_DEP, ["ext4"]))


class CopyModulesTest(testtools.TestCase):
    def test_compressed_modules_are_unpacked_and_all_are_numbered(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        source, target = Path(folder.name) / "in", Path(folder.name) / "out"
        source.mkdir()
        (source / "a.ko").write_bytes(b"plain")
        (source / "b.ko.xz").write_bytes(lzma.compress(b"packed"))
        copy_modules(source, ["a.ko", "b.ko.xz"], target)
        found = {path.name: path.read_bytes() for path in target.iterdir()}
        self.assertEqual({"00-a.ko": b"plain", "01-b.ko": b"packed"}, found)


class RecipeHashTest(testtools.TestCase):
    def test_another_release_is_another_guest(self) -> None:
        self.assertNotEqual(recipe_hash("bookworm"), recipe_hash("trixie"))


class LacksReleaseTest(testtools.TestCase):
    def test_a_release_that_no_source_holds_is_told_from_other_failures(self) -> None:
        said = "E: The repository 'http://mirror.example/debian trixie Release' does not have a Release file.\n"
        self.assertTrue(lacks_release(said, "trixie"))
        self.assertFalse(lacks_release(said.replace("trixie", "trixie-security"), "trixie"))
        self.assertFalse(lacks_release("E: Failed to fetch http://mirror.example/debian trixie Release", "trixie"))
