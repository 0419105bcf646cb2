"""Where the chunk store's program is found."""

from __future__ import annotations

import os
import re
import sysconfig
import tomllib
from pathlib import Path
from unittest import mock

from testtools import TestCase

from drivers.chunkstore.program import program
from drivers.errors import ToolMissing
from drivers.needs import VIRTMAN_CHUNKD, Finding, Machine, Needs, check
from tests.unit.virtman.scene import folder_for


class VersionTest(TestCase):
    def test_the_program_has_the_version_of_the_package(self) -> None:
        """An agent ends a process of another version."""
        root = Path(__file__).parents[3]
        package = re.search(r'\bversion="(\d.+)"', (root / "setup.py").read_text())
        crate = tomllib.loads((root / "chunkd/Cargo.toml").read_text())["package"]
        self.assertEqual(crate["version"], package and package[1])


class ProgramTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.beside, self.on_path = (folder_for(self) for _ in range(2))
        self.enterContext(mock.patch.object(sysconfig, "get_path", return_value=str(self.beside)))
        self.enterContext(mock.patch.dict(os.environ, PATH=str(self.on_path)))

    def install(self, folder: Path) -> str:
        path = folder / VIRTMAN_CHUNKD.name
        path.touch(mode=0o755)
        return str(path)

    def test_the_program_beside_python_comes_before_that_on_path(self) -> None:
        on_path = self.install(self.on_path)
        self.assertEqual(on_path, program())
        self.assertEqual(self.install(self.beside), program())

    def test_a_program_that_is_nowhere_is_missing_and_the_doctor_says_what_to_do(self) -> None:
        self.assertIn("virtman-chunkd", str(self.assertRaises(ToolMissing, program)))
        [finding] = check(Needs(tools=(VIRTMAN_CHUNKD,)), Machine(), "")
        self.assertEqual(Finding("virtman-chunkd", met=False, remedy=VIRTMAN_CHUNKD.remedy), finding)

    def test_a_program_beside_python_meets_the_need(self) -> None:
        self.install(self.beside)
        self.assertTrue(Machine().has_tool(VIRTMAN_CHUNKD.name))
