"""Which layers of a disk nobody needs, and what to do with them."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from unittest import mock

import testtools
from hypothesis import given
from hypothesis import strategies as st

from drivers.errors import BadDisk, VmDiskMissing
from drivers.snapshot.layers import Layers, Step, next_step, remove_orphans
from drivers.snapshot.layerstore import LayerStore
from tests.unit.virtman.scene import folder_for


class NextStepTest(testtools.TestCase):
    CHAIN = {0: None, 1: 0, 2: 1, 3: 2}  # noqa: RUF012

    def test_into_or_out_of_what_is_shared_nothing_is_copied(self) -> None:
        for kept, shared in (([1, 2, 3], [0]), ([2, 3], [0, 1]), ([2, 3], [0, 1, 2]), ([3], [0, 1, 2, 3])):
            self.assertIsNone(next_step(self.CHAIN, kept, shared))
        self.assertEqual(Step(2, 3), next_step(self.CHAIN, [3], [0, 1]))
        for shared in ([0], [1]):
            self.assertIsNone(next_step({0: None, 1: 0}, [1], shared))

    def test_a_disk_that_is_folded_gets_a_copy_of_what_it_shares(self) -> None:
        self.assertEqual(Step(2, 3), next_step(self.CHAIN, [3], [0, 1, 2], fold=True))
        self.assertEqual(Step(1, 3), next_step({0: None, 1: 0, 3: 1}, [3], [0, 1], fold=True))
        self.assertIsNone(next_step(self.CHAIN, [2, 3], [0, 1, 2], fold=True))
        self.assertIsNone(next_step({0: None, 1: 0}, [1], [0, 1], fold=True))

    def test_what_is_shared_and_nothing_is_over_goes(self) -> None:
        self.assertEqual(Step(1, None), next_step({0: None, 1: 0}, [0], [0, 1]))

    @given(st.data(), st.integers(1, 9))
    def test_any_tree_ends_with_what_is_needed_and_what_that_shares(self, data: st.DataObject, count: int) -> None:
        below: dict[int, int | None] = {0: None}
        for number in range(1, count):
            below[number] = data.draw(st.integers(0, number - 1))
        kept = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
        ancestors = {number: _down(below, number) & kept for number in kept}
        while step := next_step(below, kept):
            self.assertNotIn(step.lower, kept)
            over = {number for number, lower in below.items() if lower == step.lower}
            self.assertEqual({step.upper} - {None}, over)
            if step.upper is not None:
                below[step.upper] = below[step.lower]
            del below[step.lower]
        self.assertEqual(ancestors, {number: _down(below, number) & kept for number in kept})
        for number in set(below) - kept:
            self.assertGreater(sum(lower == number for lower in below.values()), 1)


def _down(below: dict[int, int | None], number: int | None) -> set[int]:
    found = set()
    while number is not None:
        found.add(number)
        number = below[number]
    return found


EXPORT = {"driver": "raw", "file": {"driver": "nbd", "server": {"type": "unix", "path": "/s"}, "export": "e"}}


class FilesTest(testtools.TestCase):
    def setUp(self) -> None:
        super().setUp()
        state = folder_for(self)
        self.folder = state / "snapshots"
        self.store = LayerStore(self.folder)
        self.store.folder.mkdir(parents=True)
        self.layers = self.disk("vm")

    def disk(self, vm: str) -> Layers:
        return Layers(self.store, vm)

    def add(self, backing: str, size: int = 1 << 20) -> int:
        fresh = self.store.fresh()
        head = struct.pack(">4sIQIIQ", b"QFI\xfb", 3, 104, len(backing), 16, size)
        fresh.write_bytes(head.ljust(104, b"\0") + backing.encode())
        return self.layers.add(fresh)

    def chain(self, length: int) -> None:
        self.add(f"json:{json.dumps(EXPORT)}")
        for number in range(1, length):
            self.add(str(self.layers.file(number - 1)))
        self.layers.activate(length - 1)

    def test_the_path_leads_to_the_active_layer(self) -> None:
        self.chain(3)
        self.assertEqual(self.layers.file(2), self.layers.path.resolve())
        self.assertEqual("2.qcow2", str(self.layers.path.readlink()))
        self.assertEqual([2, 1, 0], [layer.number for layer in self.layers.chain()])
        self.assertEqual(EXPORT, self.layers.chain()[-1].image)

    def test_a_number_is_given_once_while_its_file_is_there(self) -> None:
        self.chain(3)
        self.layers.remove(1)
        self.assertEqual(["3.new", "4.new"], [self.store.fresh().name for _ in range(2)])
        remove_orphans(self.store)
        self.assertEqual({"0.qcow2", "2.qcow2"}, {path.name for path in self.store.folder.iterdir()})

    def test_a_link_that_a_crash_left_is_of_no_layer_and_in_nobodys_way(self) -> None:
        self.chain(2)
        with mock.patch.object(Path, "rename", side_effect=OSError("cut off")):
            self.assertRaises(OSError, self.add, str(self.layers.file(1)))
        self.assertEqual(({0, 1}, Step(2, None)), (set(self.layers.all()), self.layers.next_unneeded(fold=False)))
        remove_orphans(self.store)
        self.assertEqual(2, self.add(str(self.layers.file(1))))

    def test_snapshots_are_kept_until_they_are_replaced(self) -> None:
        self.assertRaises(VmDiskMissing, self.layers.snapshots)
        self.chain(2)
        self.assertEqual({}, self.layers.snapshots())
        self.layers.write_snapshots({"a": 0, "b": 0})
        self.assertEqual({"a": 0, "b": 0}, self.disk("vm").snapshots())

    def test_broken_snapshots_are_refused(self) -> None:
        self.chain(1)
        for text in ("", "7", "[]", '{"snapshots": 3}', '{"snapshots": {"a": "x"}}', '{"snapshots": {"a": null}}'):
            (self.layers.folder / "snapshots.json").write_text(text)
            self.assertRaises(BadDisk, self.layers.snapshots)

    def test_chains_that_lead_elsewhere_are_refused(self) -> None:
        self.chain(1)
        self.layers.rename(self.disk("other"))
        for backing in ("", "/etc/passwd", "x.qcow2", *(str(self.layers.file(number)) for number in (0, 2, 3))):
            self.layers.delete()
            self.add(f"json:{json.dumps(EXPORT)}")
            self.layers.activate(self.add(backing))
            self.assertRaises(BadDisk, self.layers.chain)
        file = {"driver": "file", "filename": "/etc/shadow"}
        tcp = {"type": "inet", "host": "other", "port": "1"}
        nodes = (file, {"driver": "raw", "file": file}, {"driver": "raw", "file": {"driver": "nbd", "server": tcp}})
        for text in ("json:", "json:[]", "json:3", *(f"json:{json.dumps(node)}" for node in nodes)):
            self.layers.delete()
            self.layers.activate(self.add(text))
            self.assertRaises(BadDisk, lambda: self.layers.chain()[-1].image)

    def test_data_that_are_elsewhere_are_refused(self) -> None:
        self.chain(1)
        file = self.layers.file(0)
        head = bytearray(file.read_bytes())
        head[79] = 4  # of the incompatible features, that of an external data file
        file.write_bytes(head)
        self.assertIn("its data are in another file", str(self.assertRaises(BadDisk, self.layers.chain)))

    def test_a_link_that_leads_elsewhere_is_refused(self) -> None:
        self.chain(1)
        link = self.layers.path
        for target in ("/etc/passwd", "../other/0.qcow2", "snapshots.json", "disk.qcow2", "5.qcow2"):
            link.unlink()
            link.symlink_to(target)
            self.assertRaises(BadDisk, self.layers.chain)

    def test_deleting_leaves_nothing(self) -> None:
        self.chain(2)
        self.layers.write_snapshots({"a": 0})
        for _ in range(2):
            self.layers.delete()
            self.assertEqual([], [*self.folder.glob("[!.]*"), *self.store.folder.iterdir()])

    def test_a_deletion_that_is_cut_off_leaves_no_disk(self) -> None:
        self.chain(2)
        with mock.patch.object(shutil, "rmtree", side_effect=OSError("cut off")):
            self.assertRaises(OSError, self.layers.delete)
        self.assertFalse(self.layers.exist())

    def test_a_removal_that_is_cut_off_leaves_no_file_without_a_link(self) -> None:
        self.chain(2)
        unlink, gone = Path.unlink, list[Path]()

        def one(path: Path, *, missing_ok: bool = False) -> None:
            if gone:
                raise OSError("cut off")
            gone.append(path)
            unlink(path, missing_ok=missing_ok)

        with mock.patch.object(Path, "unlink", one):
            self.assertRaises(OSError, self.layers.remove, 1)
        self.assertFalse(self.layers.file(1).exists())

    def test_what_several_disks_have_is_not_merged(self) -> None:
        self.chain(3)
        clone = self.disk("clone")
        clone.share(self.layers.down_from(self.layers.layer(1)))
        self.assertIsNone(self.layers.next_unneeded(fold=False))
        clone.delete()
        self.assertEqual(Step(1, 2), self.layers.next_unneeded(fold=False))

    def test_who_may_pass_through_the_folder_of_disks_may_do_so_here(self) -> None:
        for mode in (0o711, 0o700):
            self.layers.delete()
            self.folder.chmod(mode)
            self.chain(1)
            self.assertEqual(mode, self.layers.folder.stat().st_mode & 0o777)

    def test_it_is_of_the_same_group(self) -> None:
        if os.geteuid() != 0:
            self.skipTest("only root can give folders to other groups")
        os.chown(self.folder, -1, 65533)
        self.chain(1)
        self.assertEqual(65533, self.layers.folder.stat().st_gid)
