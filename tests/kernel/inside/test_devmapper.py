"""Device-mapper maps by name, and loop devices, of which maps are made."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from testtools import TestCase

from drivers import devmapper, loopdev
from drivers.command import run
from tests.kernel.inside.filesystems import small_file_system

ZEROS = "0 2048 zero"


class MapsTest(TestCase):
    """Maps of zeros."""

    def half(self, name: str) -> str:
        """A map without a table, as a dmsetup that was killed leaves it."""
        run(["dmsetup", "create", "--notable", name])
        self.addCleanup(devmapper.remove, name)
        return name

    def test_a_half_made_map_is_there_and_can_be_removed(self) -> None:
        name = self.half("virtman-test-half")
        self.assertTrue(devmapper.exists(name))
        devmapper.remove(name)
        self.assertFalse(devmapper.exists(name))

    def test_a_half_made_map_is_made_anew(self) -> None:
        name = self.half("virtman-test-half")
        path = devmapper.create(name, [ZEROS], read_only=True)
        self.assertEqual(bytes(1 << 20), path.read_bytes())

    def test_a_map_that_is_there_stays(self) -> None:
        name = "virtman-test-whole"
        self.addCleanup(devmapper.remove, name)
        first = devmapper.number(devmapper.create(name, [ZEROS]))
        self.assertEqual(first, devmapper.number(devmapper.create(name, [ZEROS])))

    def test_a_map_gets_another_table(self) -> None:
        name = "virtman-test-whole"
        self.addCleanup(devmapper.remove, name)
        devmapper.create(name, [ZEROS])
        devmapper.reload(name, [ZEROS, "2048 2048 zero"])
        self.assertEqual(2, len(devmapper.table(name).splitlines()))
        self.assertEqual(2 << 20, len(devmapper.map_path(name).read_bytes()))

    def test_maps_are_listed_by_the_beginning_of_their_names_however_many_there_are(self) -> None:
        names = {self.half(f"virtman-test-{number:02}-{'long' * 25}") for number in range(40)}
        self.assertEqual(names, devmapper.names("virtman-test-"))
        self.assertEqual(frozenset(), devmapper.names("virtman-test-x"))


class LoopsTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
        self.addCleanup(shutil.rmtree, self.folder)

    def kind(self, folder: Path) -> str:
        """Whether the loop device of a file goes past the page cache, and the bytes of its sectors."""
        file = folder / "file"
        file.write_bytes(bytes(1 << 20))
        self.addCleanup(loopdev.detach, file)
        return " ".join(run(["losetup", "-n", "-O", "DIO,LOG-SEC", str(loopdev.attach(file))]).stdout.split())

    def test_a_file_is_read_past_the_page_cache(self) -> None:
        self.assertEqual("1 512", self.kind(self.folder))

    def test_sectors_are_of_512_bytes_also_on_a_disk_with_larger_ones(self) -> None:
        self.assertEqual("0 512", self.kind(small_file_system(self, self.folder, "16M", sector=4096)))
