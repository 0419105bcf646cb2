"""Skipped tests, which fail where CI is set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from testtools import TestCase

from tests.unit.virtman.scene import folder_for

CHECKOUT = Path(__file__).parents[2]
OURS = ("CI", "PYTEST_ADDOPTS")

OF_A_TEST = """
import unittest
class Test(unittest.TestCase):
    def test(self):
        self.skipTest("no room")
"""
OF_A_FILE = """
import pytest
pytest.skip("no room", allow_module_level=True)
"""


class SkipsTest(TestCase):
    def run_file(self, content: str, **environment: str) -> tuple[int, str]:
        """How pytest ends with a file of tests, and what it says."""
        file = folder_for(self) / "test_it.py"
        file.write_text(content)
        options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-rs", "-q", f"--rootdir={file.parent}"]
        inherited = {name: value for name, value in os.environ.items() if name not in OURS}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # to import those of others takes seconds
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, str(file)],
            cwd=CHECKOUT, env=inherited | environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def test_where_ci_is_set_they_fail(self) -> None:
        for content, code in ((OF_A_TEST, pytest.ExitCode.TESTS_FAILED), (OF_A_FILE, pytest.ExitCode.INTERRUPTED)):
            ended, said = self.run_file(content, CI="true")
            self.assertEqual(code, ended, said)
            self.assertIn("skipped, though CI is set", said)
            self.assertIn("no room", said)

    def test_elsewhere_they_are_told(self) -> None:
        for content, code in ((OF_A_TEST, pytest.ExitCode.OK), (OF_A_FILE, pytest.ExitCode.NO_TESTS_COLLECTED)):
            ended, said = self.run_file(content)
            self.assertEqual(code, ended, said)
            self.assertIn("no room", said)
