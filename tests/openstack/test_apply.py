"""Applying and reverting on copies of the installed Nova."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from testtools import TestCase

from openstack_nova_patch.tool import ours, series, work
from openstack_nova_patch.tool.tree import Form
from tests.sweeps import kills
from tests.unit.opennebula_tm.scene import Cut, CutAt, tree

ROOT = Path(__file__).parents[2]
APPLY = ROOT / "openstack_nova_patch/apply"
INSTALLED = Path(sysconfig.get_path("purelib"))
"""Where the environment has its Nova; what is imported here is the patched copy."""
IMPORTS = "import nova.conf, nova.compute.manager, nova.compute.api, nova.virt.libvirt.driver as d; print(d.__file__)"


def patch_for(nova: Path, step: CutAt | None = None) -> work.Patch:
    """The patch of this repository for this Nova."""
    return work.Patch(nova.resolve(), series.read_all(), ours.HERE, step or CutAt())


class ApplyTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(tempfile.mkdtemp(prefix="virtman nova "))
        self.addCleanup(shutil.rmtree, self.folder)
        self.nova = self.folder / "nova"

    def copy(self, *left_out: str) -> None:
        """Nova as it is installed; less takes less time."""
        shutil.copytree(INSTALLED / "nova", self.nova, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
        self.before = tree(self.nova)

    def apply(self, *options: str) -> tuple[int, str]:
        done = subprocess.run(
            [str(APPLY), "--nova", str(self.nova), *options], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def test_all_is_as_it_was_after_the_revert(self) -> None:
        self.copy()
        self.assertEqual(1, self.apply("--check")[0])
        self.assertEqual(0, self.apply()[0])
        self.assertEqual(0, self.apply("--check")[0])
        changed = patch_for(self.nova).look().series.changes
        now = tree(self.nova)
        names = {str(Path(change.file).relative_to("nova")) for change in changed}
        self.assertEqual(names, {name for name in self.before if self.before[name] != now[name]})
        self.assertEqual({"virtman"}, {name.partition("/")[0] for name in now.keys() - self.before.keys()})
        self.assertEqual(0, self.apply("--revert")[0])
        self.assertEqual(1, self.apply("--check")[0])
        self.assertEqual(self.before, tree(self.nova))

    def test_the_nova_of_this_environment_is_found_and_was_left_alone(self) -> None:
        argv = [str(APPLY), "--python", sys.executable, "--check"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        self.assertEqual(1, done.returncode, done.stderr)
        self.assertIn(f"{INSTALLED.resolve()}/nova: not applied", done.stdout)

    def test_nova_can_be_imported_wherever_it_is_killed(self) -> None:
        self.copy("tests")
        steps = CutAt()
        patch_for(self.nova, steps).apply()
        all_steps = [number for number in range(len(steps.seen)) if self.cut_after_a_file_of_nova(number)]
        for number in kills(all_steps):
            self.cut_after_a_file_of_nova(number)
            argv = [sys.executable, "-B", "-c", IMPORTS]
            done = subprocess.run(
                argv, env={"PYTHONPATH": str(self.folder)}, cwd=self.folder, capture_output=True, text=True, check=False
            )
            self.assertEqual(0, done.returncode, done.stderr)
            self.assertEqual(f"{self.nova}/virt/libvirt/driver.py", done.stdout.strip())

    def cut_after_a_file_of_nova(self, number: int) -> bool:
        """Whether the step before that of this number put one, and others are still to come."""
        patch_for(self.nova).revert()
        steps = CutAt(number)
        self.assertRaises(Cut, patch_for(self.nova, steps).apply)
        look = patch_for(self.nova).look()
        return bool(look.are(Form.AFTER))
