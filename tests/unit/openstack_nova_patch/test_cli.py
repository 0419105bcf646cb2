"""The command line of apply: its exit codes, and one line for whatever is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from testtools import TestCase

from openstack_nova_patch.tool import find
from openstack_nova_patch.tool.cli import parser
from openstack_nova_patch.tool.errors import Refused
from tests.unit.opennebula_tm.scene import Cut, CutAt, write
from tests.unit.openstack_nova_patch.scene import Scene
from tests.unit.virtman.scene import folder_for

ROOT = Path(__file__).parents[3]


class CommandLineTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(folder_for(self))

    def test_a_life(self) -> None:
        for options, code, said in (
            (("--check",), 1, "not applied (patch for Nova 34.0.0)"), ((), 0, "has the patch; restart"),
            ((), 0, "nothing to do"),
            (("--check",), 0, "applied (patch for Nova 34.0.0)"), (("--revert",), 0, "is what it was; restart"),
            (("--revert",), 0, "nothing to do"), (("--check",), 1, "not applied"),
        ):  # fmt: skip
            ended, out, err = self.scene.run(*options)
            self.assertEqual((code, "", 1), (ended, err, out.count("\n")), out)
            self.assertIn(f"{self.scene.nova.resolve()}: {said}", out)

    def test_check_tells_a_half_and_how_much_of_it(self) -> None:
        steps = CutAt()
        self.scene.patch(steps).apply()
        self.scene.patch().revert()
        self.assertRaises(Cut, self.scene.patch(CutAt(len(steps.seen) - 1)).apply)
        code, out, _ = self.scene.run("--check")
        self.assertEqual(2, code)
        self.assertIn("half applied: 2 of 3 files of Nova are changed", out)
        self.assertIn("nova/virtman is whole", out)
        (self.scene.nova / "virtman/volume.py").unlink()
        self.assertIn("nova/virtman is of another release or not whole", self.scene.run("--check")[1])

    def test_check_tells_what_does_not_fit(self) -> None:
        self.scene.edit("compute/api.py", "line 3", "row 3")
        code, out, _ = self.scene.run("--check")
        self.assertEqual(3, code)
        self.assertIn("/nova/compute/api.py is neither", out)
        for options in ((), ("--revert",)):
            code, out, err = self.scene.run(*options)
            self.assertEqual((1, "", 1), (code, out, err.count("\n")))
            self.assertIn("/nova/compute/api.py is neither", err)

    def test_no_patch_is_one_line(self) -> None:
        self.enterContext(mock.patch.dict(os.environ, PATH=str(self.scene.folder)))
        before = self.scene.tree()
        self.assertEqual((1, "", "apply: patch is not installed: apt install patch\n"), self.scene.run())
        self.assertEqual(before, self.scene.tree())

    def test_wrong_options_have_a_code_that_no_check_has(self) -> None:
        for options in (["--chek"], ["--nova"], ["--nova", "a", "--python", "b"], ["--check", "--revert"], ["nova"]):
            raised: SystemExit = self.assertRaises(SystemExit, parser().parse_args, options)
            self.assertEqual(4, raised.code, " ".join(options))

    def test_the_executable_needs_nothing_but_python(self) -> None:
        for name in ("apply", "refresh"):
            argv = ["/usr/bin/python3", "-ISB", str(ROOT / "openstack_nova_patch" / name), "--help"]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            self.assertEqual((0, ""), (done.returncode, done.stderr))
            self.assertIn("example", done.stdout)


class FindTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(folder_for(self))

    def python(self, script: str) -> str:
        path = self.scene.folder / "python"
        write(path, f"#!/bin/sh\n{script}\n", 0o755)
        return str(path)

    def test_the_nova_that_a_python_imports(self) -> None:
        site = self.scene.nova.parent
        # As an environment has it: in a folder that this Python knows when it starts. Nova's own code is not run.
        write(self.scene.nova / "__init__.py", "raise SystemExit(3)")
        code = f"import sys; sys.path.insert(0, {str(site)!r}); exec(sys.argv.pop(1))"
        before = self.scene.tree()
        found = find.by_python(
            self.python(f'[ "$1" = -IB ] || exit 9; shift 2; exec {sys.executable} -IB -c "{code}" "$@"')
        )
        self.assertEqual(self.scene.nova.resolve(), found)
        self.assertEqual(before, self.scene.tree())

    def test_a_python_that_has_no_nova_or_does_not_work(self) -> None:
        for python, why in (
            ("/usr/bin/python3", "has no Nova: name its Python with --python"),
            ("/none", "^/none cannot be run: No such file"),
            (self.python("echo no >&2; exit 3"), "python is not a Python that works: no"),
        ):
            self.assertRaisesRegex(Refused, why, find.by_python, python)
        self.assertRaisesRegex(Refused, "works: exit code 3", find.by_python, self.python("exit 3"))

    def test_a_folder_that_is_not_novas(self) -> None:
        for folder in (self.scene.folder, self.scene.folder / "none", self.scene.nova / "compute"):
            self.assertRaisesRegex(Refused, f"^{folder} is not the folder of the package nova", find.by_folder, folder)

    def test_a_link_to_the_folder_is_followed(self) -> None:
        link = self.scene.folder / "link"
        link.symlink_to(self.scene.nova)
        self.assertEqual(self.scene.nova.resolve(), find.by_folder(link))
