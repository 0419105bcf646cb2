"""What make defects tries: the operators are those of the installed Cosmic Ray, and only the lines asked for change."""

from __future__ import annotations

import grimp
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
        graph, (first, second) = grimp.ImportGraph(), ("tests.unit.test_a", "tests.unit.test_b")
        for importer, imported in (("p.a", "p.c"), (first, "p.a"), (first, "p.b"), (second, "p.b")):
            graph.add_import(importer=importer, imported=imported)
        graph.add_module("p.d")
        self.assertEqual([second, first], importing("p.b", graph))
        self.assertEqual([first], importing("p.c", graph))
        self.assertEqual([], importing("p.d", graph))
