"""What is said at the end of a run."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout

from testtools import TestCase

from tests import summary
from tests.unit.virtman.scene import folder_for


class SummaryTest(TestCase):
    def test_a_run_has_failed_if_an_environment_has_or_none_ran(self) -> None:
        folder = folder_for(self)
        for ran, code, said in (
            (None, 1, "tox has left no result"),
            ({}, 1, "tox has left no result"),
            ({"lint": 0}, 0, "failed: nothing"),
            ({"lint": 0, "unit": 1}, 1, "failed: unit"),
        ):
            if ran is not None:
                results = {
                    name: {"result": {"success": ended == 0, "duration": 7.5, "skipped": False}}
                    for name, ended in ran.items()
                }
                (folder / "tox.json").write_text(json.dumps({"testenvs": {**results, "boot": {}}}))
            with redirect_stdout(io.StringIO()) as out:
                self.assertEqual(code, summary.main(folder, folder / "durations.json"))
            self.assertIn(said, out.getvalue())
