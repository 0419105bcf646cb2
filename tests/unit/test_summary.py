"""What is said at the end of a run."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout

from testtools import TestCase

from tests import summary
from tests.unit.virtman.scene import folder_for

TESTS = """
import unittest
class Test(unittest.TestCase):
    def test_good(self):
        pass
    def test_bad(self):
        self.fail("begin" + "x" * 2000 + "end")
class Unready(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise Exception("lacks")
    def test_it(self):
        pass
"""


class SummaryTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.durations = self.folder / "durations.json"

    def said(self, ok: int, **exit_codes: int) -> str:
        """What is said after tox's results; ``ok``: the exit code."""
        told = {
            name: {"result": {"success": code == 0, "exit_code": code, "duration": 7.5, "skipped": False}}
            for name, code in exit_codes.items()
        }
        (self.folder / "tox.json").write_text(json.dumps({"testenvs": {**told, "boot": {}}}))
        with redirect_stdout(io.StringIO()) as out:
            self.assertEqual(ok, summary.main(self.folder, self.durations))
        return out.getvalue()

    def test_what_failed_is_said_by_the_end_of_its_message_and_durations_are_kept(self) -> None:
        file = self.folder / "test_it.py"
        environment = {**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        for content, results in ((TESTS, "unit.xml"), ("import no_such_module", "unit.guest.xml")):
            file.write_text(content)
            options = ["-p", "no:cacheprovider", f"--rootdir={self.folder}", f"--junit-xml={self.folder / results}"]
            argv = [sys.executable, "-m", "pytest", *options, str(file)]
            subprocess.run(argv, cwd=self.folder, env=environment, capture_output=True, check=False)
        said = self.said(1, lint=0, unit=1)
        for expected in ("Test.test_bad", "xend", "Unready.test_it", "lacks", "no_such_module", "failed: unit"):
            self.assertIn(expected, said)
        self.assertNotIn("beginx", said)
        unit = json.loads(self.durations.read_text())["unit"]
        self.assertEqual((7.5, False, 4), (unit["seconds"], unit["ok"], len(unit["longest"])))

    def test_a_run_has_failed_if_an_environment_has_or_none_ran(self) -> None:
        self.assertEqual(1, summary.main(self.folder, self.durations))  # tox has left no result
        self.assertIn("no result", self.said(1))
        self.assertIn("failed: nothing", self.said(0, lint=0))
