"""The volumes of the chunk store's pool: files and disks that come and go while an image is read."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from drivers.errors import BadVolume
from tests.programs import require_root
from tests.userspace.drivers.chunkhosts import MIB, ChunkHostCase


class ChunkPoolTest(ChunkHostCase):
    def setUp(self) -> None:
        super().setUp()
        self.image, self.file = self.make_image()
        self.top, self.child = self.host("top"), self.host("child")
        self.top.serve_file(self.image, self.file, "child")
        self.child.join(self.image, [self.top])
        self.pool = self.child.source.group

    def listed(self) -> dict[str, str]:
        return {volume.path: volume.state for volume in self.pool.volumes()}

    def first(self) -> Path:
        return self.child.place.state / "chunkstore/pool"

    def disk(self) -> Path:
        """A disk that holds nothing."""
        require_root(self, "loop devices are made")
        file = self.root / "disk"
        file.touch()
        subprocess.run(["truncate", "--size", str(64 * MIB), str(file)], check=True)
        argv = ["losetup", "--find", "--show", str(file)]
        made = subprocess.run(argv, capture_output=True, text=True, check=False)
        if made.returncode:
            self.skipTest(f"there are no loop devices: {made.stderr}")
        loop = Path(made.stdout.strip())
        self.addCleanup(subprocess.run, ["losetup", "--detach", str(loop)], check=True)
        return loop

    def test_there_is_one_file_until_others_are_named(self) -> None:
        self.assertEqual({str(self.first()): "running"}, self.listed())

    def test_an_image_is_read_on_while_its_volume_is_replaced_by_another_and_by_a_disk(self) -> None:
        self.assert_same(self.child.uri(self.image), self.file)
        added = self.pool.add_volume(self.root / "more")
        self.assertEqual(("running", ""), (added.state, added.trouble))
        for path in (self.first(), self.root / "more"):
            self.assertTrue(self.pool.remove_volume(path))
            self.assertFalse(path.exists())
            self.assert_same(self.child.uri(self.image), self.file)
        self.assertEqual({}, self.listed())
        disk = self.disk()
        self.assertEqual(64 * MIB, self.pool.add_volume(disk).size)
        self.assert_same(self.child.uri(self.image), self.file)
        self.child.restart()
        self.pool = self.child.source.group
        self.child.join(self.image, [self.top])
        self.child.wait_held(self.image, self.image.size)
        self.assertTrue(self.pool.remove_volume(disk))
        self.assertEqual(bytes(MIB), disk.read_bytes()[:MIB])

    def test_another_limit_holds_from_the_next_agent_on(self) -> None:
        more = self.root / "more"
        self.pool.add_volume(more)
        self.child.place = replace(self.child.place, cache_limit=32 * MIB)
        self.child.restart()
        self.child.join(self.image, [self.top])
        self.assertEqual([32 * MIB] * 2, [volume.size for volume in self.child.source.group.volumes()])
        self.assertLess(more.stat().st_size, 33 * MIB)
        self.assert_same(self.child.uri(self.image), self.file)

    def test_what_somebody_else_may_need_is_refused_and_left_alone(self) -> None:
        file = self.root / "theirs"
        file.write_bytes(b"theirs")
        disk = self.disk()
        disk.write_bytes(b"theirs")
        for path in (file, disk, self.root, self.root / "none/file", Path("relative")):
            self.assertRaises(BadVolume, self.pool.add_volume, path)
        self.assertEqual([b"theirs"] * 2, [path.read_bytes()[:6] for path in (file, disk)])
        self.assertEqual({str(self.first()): "running"}, self.listed())

    def test_one_that_is_none_is_no_error(self) -> None:
        self.assertFalse(self.pool.remove_volume(self.root / "none"))
        self.pool.tend_volume(self.root / "none")
