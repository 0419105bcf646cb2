"""Applying and reverting on a small Nova: whole or not at all, and from wherever a run was cut off."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os

from testtools import TestCase

from openstack_nova_patch.tool import disk
from openstack_nova_patch.tool.errors import Refused, Unfit
from openstack_nova_patch.tool.tree import Verdict
from tests.limits import FileSize
from tests.unit.opennebula_tm.scene import tree, was_cut, write
from tests.unit.openstack_nova_patch.scene import CHANGED, FILES, Scene, change, nova
from tests.unit.virtman.scene import folder_for


class SceneTestCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(folder_for(self))
        self.before = self.scene.tree()

    def verdict(self) -> Verdict:
        return self.scene.patch().look().verdict()


class LifeTest(SceneTestCase):
    def test_all_is_as_it_was_after_the_revert(self) -> None:
        self.assertIs(Verdict.NOT_APPLIED, self.verdict())
        self.assertTrue(self.scene.patch().apply())
        self.assertIs(Verdict.APPLIED, self.verdict())
        applied = self.scene.tree()
        self.assertNotEqual(self.before, applied)
        self.assertFalse(self.scene.patch().apply())
        self.assertEqual(applied, self.scene.tree())
        for reverts in (True, False):
            self.assertEqual(reverts, self.scene.patch().revert())
            self.assertEqual(self.before, self.scene.tree())

    def test_files_of_nova_become_what_the_series_says_and_our_modules_are_there(self) -> None:
        wanted = nova(folder_for(self))
        change(wanted)
        self.scene.patch().apply()
        found = self.scene.tree()
        self.assertEqual(
            {"__init__.py", "volume.py", "parts", "parts/__init__.py"}, set(tree(self.scene.nova / "virtman"))
        )
        self.assertEqual(tree(wanted), {name: found[name] for name in found if not name.startswith("virtman")})

    def test_what_python_compiled_of_ours_goes_and_what_it_compiled_of_novas_stays(self) -> None:
        self.scene.patch().apply()
        for name in ("virtman/__pycache__/x.pyc", "virtman/parts/__pycache__/y.pyc"):
            write(self.scene.nova / name, b"\0")
        self.assertIs(Verdict.APPLIED, self.verdict())
        write(self.scene.nova / "conf/__pycache__/compute.cpython-313.pyc", b"\0")
        self.scene.patch().revert()
        after = self.scene.tree()
        del after["conf/__pycache__/compute.cpython-313.pyc"]
        self.assertEqual(self.before, after)

    def test_a_file_that_another_environment_has_by_a_hard_link_stays_there_as_it_was(self) -> None:
        other = self.scene.folder / "other.py"
        other.hardlink_to(self.scene.nova / "compute/api.py")
        self.scene.patch().apply()
        self.assertEqual(FILES["compute/api.py"], other.read_bytes())

    def test_all_belongs_to_whom_it_belonged(self) -> None:
        if os.geteuid() != 0:
            self.skipTest("only root gives files away")
        for name in ("", "__init__.py", "compute/api.py"):
            os.chown(self.scene.nova / name, 12345, 54321)
        self.scene.patch().apply()
        for name in ("compute/api.py", "virtman", "virtman/volume.py", "virtman/parts"):
            owner = disk.owner_of(self.scene.nova / name)
            self.assertEqual((12345, 54321), (owner.uid, owner.gid), name)
        self.assertEqual(0, disk.owner_of(self.scene.nova / "compute/manager.py").uid)

    def test_the_version_is_known_by_the_files_and_not_by_a_number(self) -> None:
        write(self.scene.nova / "compute/api.py", FILES["compute/api.py"].replace(b"line 30\n", b""))
        self.before = self.scene.tree()
        look = self.scene.patch().look()
        self.assertEqual("33.0.0", look.series.version)
        self.scene.patch().apply()
        self.assertIn(b"older\nline 20", (self.scene.nova / "compute/api.py").read_bytes())
        self.scene.patch().revert()
        self.assertEqual(self.before, self.scene.tree())


class OtherReleaseTest(SceneTestCase):
    def test_modules_of_an_earlier_release_give_way(self) -> None:
        self.scene.patch().apply()
        write(self.scene.modules / "volume.py", "import nova.conf\n")
        (self.scene.modules / "parts/__init__.py").rename(self.scene.modules / "new.py")
        self.assertIs(Verdict.HALF_APPLIED, self.verdict())
        self.scene.patch().apply()
        self.assertIs(Verdict.APPLIED, self.verdict())
        self.assertEqual("import nova.conf\n", (self.scene.nova / "virtman/volume.py").read_text())
        self.assertFalse((self.scene.nova / "virtman/parts/__init__.py").exists())


class RefusedTest(SceneTestCase):
    def refused(self, why: str) -> None:
        """Both refuse, with this, and change nothing."""
        before = self.scene.tree()
        self.assertIs(Verdict.UNFIT, self.verdict())
        self.assertRaisesRegex(Unfit, why, self.scene.patch().apply)
        self.assertRaisesRegex(Unfit, why, self.scene.patch().revert)
        self.assertEqual(before, self.scene.tree())

    def test_a_file_that_somebody_changed(self) -> None:
        for prepare in (self.scene.patch().look, self.scene.patch().apply):
            prepare()
            self.scene.edit("compute/api.py", "line 3\n", "line 3 of somebody\n")
            self.refused(r"34\.0\.0.*/nova/compute/api\.py is neither as in Nova nor as the patch makes it$")
            self.scene.edit("compute/api.py", "line 3 of somebody\n", "line 3\n")

    def test_a_file_that_is_missing_or_a_link_to_one_that_others_may_have_too(self) -> None:
        real = self.scene.nova / "compute/api.py"
        real.rename(real.with_suffix(".cached"))
        self.refused(r"/nova/compute/api\.py is missing$")
        real.symlink_to(real.with_suffix(".cached"))
        self.refused(r"/nova/compute/api\.py is a link$")

    def test_all_that_do_not_fit_are_named(self) -> None:
        for name in CHANGED:
            self.scene.edit(name, "line 3", "row 3")
        self.refused(r"conf/compute\.py is neither.*; .*compute/api\.py is.*; .*compute/manager\.py is")

    def test_what_is_not_ours_in_our_folder(self) -> None:
        write(self.scene.nova / "virtman/notes.txt", "of somebody")
        self.refused(r"/nova/virtman/notes\.txt is not of this patch: move it away$")
        (self.scene.nova / "virtman/notes.txt").unlink()
        (self.scene.nova / "virtman/link.py").symlink_to("../version.py")
        self.refused(r"/nova/virtman/link\.py is not of this patch")

    def test_another_one_at_work(self) -> None:
        descriptor = os.open(self.scene.nova, os.O_RDONLY)
        self.addCleanup(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self.assertRaisesRegex(Refused, "another apply is at work in .*/site packages/nova", self.scene.patch().apply)
        self.assertRaisesRegex(Refused, "another apply is at work", self.scene.patch().revert)
        self.assertEqual(self.before, self.scene.tree())


class CutTest(SceneTestCase):
    def run_patch(self, act: str, step: disk.Step = disk.no_step) -> None:
        getattr(self.scene.patch(step), act)()

    def test_wherever_it_is_cut_the_next_one_goes_on_whichever_it_is(self) -> None:
        """And what Nova finds meanwhile are the first patches of the series and all modules."""
        self.scene.patch().apply()
        trees = {"apply": self.scene.tree(), "revert": self.before}
        self.scene.patch().revert()
        for act, then in itertools.product(trees, trees):
            for number in itertools.count():
                if act == "revert":
                    self.scene.patch().apply()
                if not was_cut(number, self.run_patch, act):
                    break
                changed = [b"ours" in (self.scene.nova / name).read_bytes() for name in CHANGED]
                self.assertEqual(sorted(changed, reverse=True), changed, str(number))
                if any(changed):
                    self.assertEqual([], self.scene.patch().look().ours.stale(), str(number))
                self.assertIn(self.verdict(), (Verdict.HALF_APPLIED, Verdict.APPLIED, Verdict.NOT_APPLIED))
                self.run_patch(then)
                self.assertEqual(trees[then], self.scene.tree(), f"{act} {number} {then}")
                self.scene.patch().revert()
            self.assertGreater(number, len(CHANGED))
            self.scene.patch().revert()


class FaultTest(SceneTestCase):
    def test_a_full_disk_changes_nothing(self) -> None:
        limit = FileSize(self)

        def fill(name: str) -> None:
            if name.endswith("manager.py"):
                limit.to(100)

        raised: OSError = self.assertRaises(OSError, self.scene.patch(fill).apply)
        limit.lift()
        self.assertEqual(errno.EFBIG, raised.errno)
        self.assertEqual(str(self.scene.nova.resolve() / "compute/manager.py"), raised.filename)
        self.assertEqual(self.before, self.scene.tree())
        self.scene.patch().apply()
        applied = self.scene.tree()
        self.assertRaises(OSError, self.scene.patch(fill).revert)
        limit.lift()
        self.assertEqual(applied, self.scene.tree())
