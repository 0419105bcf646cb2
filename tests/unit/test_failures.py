"""What failed, noted for the end of a whole run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from testtools import TestCase

from tests.unit.virtman.scene import folder_for

CHECKOUT = Path(__file__).parents[2]
TESTS = """
import unittest
class Test(unittest.TestCase):
    def test_good(self):
        pass
    def test_bad(self):
        self.fail("begin" + "x" * 1000 + "end \\udcff")
class Unready(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise Exception("lacks")
    def test_it(self):
        pass
"""
UNREADABLE = "import no_such_module"


class FailuresTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.notes = self.folder / "notes"

    def run_in(self, argv: list[str]) -> tuple[int, str]:
        """How a program ends that knows the file, and what it says."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        environment |= {"FAILURES": str(self.notes), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", *argv]
        done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, check=False)
        return done.returncode, done.stdout.decode(errors="backslashreplace")

    def run_tests(self, content: str) -> int:
        """How pytest ends with a file of tests."""
        file = self.folder / "test_it.py"
        file.write_text(content)
        options = ["-p", "tests.conftest", "-p", "no:cacheprovider", f"--rootdir={file.parent}"]
        return self.run_in(["pytest", *options, str(file)])[0]

    def test_what_failed_is_said_at_the_end_and_by_the_end_of_its_message(self) -> None:
        self.assertEqual(pytest.ExitCode.TESTS_FAILED, self.run_tests(TESTS))
        code, said = self.run_in(["tests.failures"])
        self.assertEqual(1, code)
        self.assertIn("test_it.py::Test::test_bad\n", said)
        self.assertIn("xend \\udcff", said)
        self.assertNotIn("beginx", said)
        self.assertIn("test_it.py::Unready::test_it\n", said)
        self.assertIn("lacks", said)
        self.assertNotIn("test_good", said)

    def test_a_file_that_cannot_be_read_is_one_of_them(self) -> None:
        self.assertEqual(pytest.ExitCode.INTERRUPTED, self.run_tests(UNREADABLE))
        self.assertIn("no_such_module", self.notes.read_text())

    def test_where_nothing_was_noted_the_run_has_failed_all_the_same(self) -> None:
        code, said = self.run_in(["tests.failures"])
        self.assertEqual(1, code)
        self.assertIn("see what was printed above", said)
