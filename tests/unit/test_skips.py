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
    def test_where_ci_is_set_they_fail(self) -> None:
        file = folder_for(self) / "test_it.py"
        options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-rs", "-q", f"--rootdir={file.parent}"]
        # To import plugins of others takes seconds.
        environment = {**os.environ, "CI": "true", "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        for content, code in ((OF_A_TEST, pytest.ExitCode.TESTS_FAILED), (OF_A_FILE, pytest.ExitCode.INTERRUPTED)):
            file.write_text(content)
            argv = [sys.executable, "-m", "pytest", *options, str(file)]
            done = subprocess.run(argv, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
            self.assertEqual(code, done.returncode, done.stdout)
            self.assertIn("skipped, though CI is set", done.stdout)
            self.assertIn("no room", done.stdout)
