"""The record of the cache's volumes, without a kernel: no image is open, and no volume runs."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from testtools import TestCase

from drivers.cache import cachegroup, cachevolumes
from drivers.cache.cachegroup import BROKEN, LEAVING, Group
from drivers.cache.cachevolumes import SHIFT, Volumes
from drivers.errors import BadVolume, NotReleased
from tests.unit.virtman.scene import folder_for

THEIRS = b"theirs" * 4096


class Unformatted(Volumes):
    """Volumes with a mark and no superblock."""

    def format(self, path: Path, number: str) -> None:
        """Write the mark."""
        path.write_bytes(f"virtman cache volume {number}".encode().ljust(SHIFT, b"\0"))


class RecordTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        for module in (cachegroup, cachevolumes):
            kernel = mock.Mock(**{"names.return_value": [], "exists.return_value": False})
            self.patch(module, "devmapper", kernel)
            self.patch(module, "bcachedev", mock.Mock(SUPERBLOCK=0))
        self.patch(cachevolumes, "loopdev", mock.Mock(**{"device_of.return_value": None}))
        room = mock.Mock(**{"spare.return_value": 1 << 30})
        self.volumes = Unformatted(file_size=1 << 20, bucket=0, room=room)
        self.group = Group(self.folder, self.volumes)
        vars(self.group)["_provided"] = True
        self.path = self.folder / "volume"
        self.group.add_volume(self.path)
        self.group.remove_volume(self.folder / "pool")

    def replace(self) -> None:
        """Somebody else's file takes the place of the volume."""
        self.path.unlink()
        self.path.write_bytes(THEIRS)

    def test_what_took_the_place_of_a_volume_is_not_erased_with_it(self) -> None:
        self.replace()
        self.assertTrue(self.group.remove_volume(self.path))
        self.assertEqual(({}, THEIRS), (self.group.recorded(), self.path.read_bytes()))

    def test_what_took_the_place_of_a_volume_that_is_to_begin_empty_is_not_formatted(self) -> None:
        self.group._set(self.path, state=BROKEN)
        self.replace()
        self.assertRaises(BadVolume, self.group.tend_volume, self.path)
        self.assertEqual((BROKEN, THEIRS), (self.group.recorded()[self.path].state, self.path.read_bytes()))

    def test_a_volume_is_not_added_by_another_path(self) -> None:
        (link := self.folder / "link").symlink_to(self.path)
        self.assertRaises(BadVolume, self.group.add_volume, link)

    def test_a_path_that_is_being_left_is_added_once_the_old_volume_is_gone(self) -> None:
        before = self.group.recorded()[self.path].number
        with mock.patch.object(self.volumes, "stop", side_effect=NotReleased("volume", 1)):
            self.assertRaises(NotReleased, self.group.remove_volume, self.path)
            self.assertRaises(NotReleased, self.group.add_volume, self.path)
        self.assertEqual(LEAVING, self.group.recorded()[self.path].state)
        self.assertEqual("", self.group.add_volume(self.path).trouble)
        self.assertNotIn(self.group.recorded()[self.path].number, ("", before))
