"""What is said at the end of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

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

    def ran(self, **exit_codes: int) -> None:
        """Leave tox's result."""
        told = {
            name: {"result": {"success": code == 0, "exit_code": code, "duration": 7.5, "skipped": False}}
            for name, code in exit_codes.items()
        }
        (self.folder / "tox.json").write_text(json.dumps({"testenvs": told}))

    def test_what_failed_is_said_by_the_end_of_its_message(self) -> None:
        file = self.folder / "test_it.py"
        environment = {**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        for content, results in ((TESTS, "unit.xml"), ("import no_such_module", "unit.guest.xml")):
            file.write_text(content)
            options = ["-p", "no:cacheprovider", f"--rootdir={self.folder}", f"--junit-xml={self.folder / results}"]
            argv = [sys.executable, "-m", "pytest", *options, str(file)]
            subprocess.run(argv, cwd=self.folder, env=environment, capture_output=True, check=False)
        self.ran(unit=1)
        [unit] = summary.environments(self.folder)
        said = summary.text([unit])
        for expected in ("Test.test_bad", "xend", "Unready.test_it", "lacks", "no_such_module", "failed: unit"):
            self.assertIn(expected, said)
        self.assertNotIn("beginx", said)

    def test_the_longest_tests_are_named_longest_first(self) -> None:
        tests = [summary.Test(f"test-{number}", number, None) for number in range(20)]
        unit = summary.Environment("unit", 30.0, True, tests)
        self.assertEqual([f"test-{number}" for number in range(19, 9, -1)], [test.name for test in unit.longest()])
        self.assertIn("all environments passed", summary.text([unit]))
        told = json.loads(summary.as_json([unit]))["unit"]
        self.assertEqual((30.0, True, 10), (told["seconds"], told["ok"], len(told["longest"])))

    def test_a_run_has_failed_if_an_environment_has_or_none_ran(self) -> None:
        durations = self.folder / "durations.json"
        self.assertEqual(1, summary.main(self.folder, durations))  # tox has left no result
        for exit_codes, expected in (({}, 1), ({"lint": 0, "unit": 1}, 1), ({"lint": 0}, 0)):
            self.ran(**exit_codes)
            self.assertEqual(expected, summary.main(self.folder, durations))
        self.assertEqual(["lint"], [*json.loads(durations.read_text())])
