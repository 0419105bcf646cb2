"""What make defects tries: the operators are those of the installed Cosmic Ray, and only the lines asked for change."""

from __future__ import annotations

from pathlib import Path

from testtools import TestCase

from tests.mutants import importing, mutants

CODE = """\
def keep(name):
    if not name:
        log.warning("none")
        store.write(name)
    return len(name) < 9
"""


class MutantsTest(TestCase):
    def test_conditions_are_turned_round_and_steps_left_out_of_these_lines_only(self) -> None:
        self.assertEqual(
            {
                (2, CODE.replace("if not", "if not not")),
                (2, CODE.replace("if not", "if ")),
                (4, CODE.replace("store.write(name)", "pass")),
            },
            set(mutants(CODE, {2, 3, 4})),
        )
        self.assertEqual([(5, CODE.replace("<", "<="))], list(mutants(CODE, {5})))

    def test_a_module_is_tested_by_what_imports_it_or_its_importers(self) -> None:
        tests = [Path("tests/unit/test_a.py"), Path("tests/unit/test_b.py")]
        imported = {Path("p/a.py"): {"p.c"}, Path("p/b.py"): set(), tests[0]: {"p.a", "p.b"}, tests[1]: {"p.b"}}
        self.assertEqual([tests[1], tests[0]], importing(Path("p/b.py"), imported))
        self.assertEqual([tests[0]], importing(Path("p/c.py"), imported))
        self.assertEqual([], importing(Path("p/d.py"), imported))
