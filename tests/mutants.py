"""Mutation testing of changed lines: change the code in a copy of the checkout, and see whether the unit tests notice.

    .venv/bin/python -m tests.mutants BASE

Cosmic Ray makes the mutants: one small change each, in lines that differ between the commit BASE and the working tree
(of new files: after "git add"), and that unit tests run. Each mutant is tested with the unit tests that import its
module. Exit code 1 if one survives: add a test, or see that the change makes no difference.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import click
import coverage
import grimp
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

SOURCES = ("virtman", "volt", "drivers", "opennebula_tm", "openstack_nova_patch")
OPERATORS = (
    *("AddNot", "ReplaceUnaryOperator_Delete_Not", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse"),
    *("ReplaceFalseWithTrue", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
    *("ExceptionReplacer", "RemoveDecorator"),
    *(f"ReplaceComparisonOperator_{change}" for change in ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")),
    *(f"ReplaceComparisonOperator_{change}" for change in ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt")),
    *(f"ReplaceBinaryOperator_{change}" for change in ("Add_Sub", "Sub_Add", "Mul_FloorDiv", "FloorDiv_Mul")),
)
"""Cosmic Ray has more, whose mutants say little: numbers one larger, "|" as "&" in annotations, "<" as ">>"."""


class RemoveCall:
    """An operator beside Cosmic Ray's, which leave out no step: "pass" in the place of a call, except of the log."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Yield the position of the call if the node is a statement that is one."""
        if node.type == "simple_stmt" and node.children[0].type == "atom_expr":
            call = node.children[0]
            if call.get_last_leaf().value == ")" and call.get_first_leaf().value != "log":
                yield call.start_pos, call.end_pos

    def mutate(self, node: Any, _index: int) -> Any:
        """Replace the call in this statement."""
        node.children[0] = get_ast(node.get_first_leaf().prefix + "pass")
        return node


def mutants(code: str, lines: Collection[int]) -> Iterator[tuple[int, str]]:
    """Yield each change of the code that touches one of these lines: the line where it begins, and the changed code."""
    nodes = list(ast_nodes(get_ast(code)))
    for operator in (RemoveCall(), *(get_operator(f"core/{name}")() for name in OPERATORS)):
        positions = (position for node in nodes for position in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(positions):
            if not set(lines).isdisjoint(range(start[0], end[0] + 1)):
                yield start[0], mutate_code(code, operator, occurrence)


def importing(module: str, graph: grimp.ImportGraph) -> list[str]:
    """Return the unit tests that import a module, its namesake first; if none do, those that import its importers."""
    level = seen = {module}
    while level:
        level = {importer for each in level for importer in graph.find_modules_that_directly_import(each)} - seen
        seen = seen | level
        if tests := [each for each in level if each.startswith("tests.unit.") and ".test_" in each]:
            return sorted(tests, key=lambda test: (not test.endswith(f".test_{module.rpartition('.')[2]}"), test))
    return []


def passes(checkout: Path, tests: list[str], *prefix: str, seconds: float = 3600, **environment: str) -> bool:
    """Tell whether these tests of a copy of the checkout pass within the time."""
    files = [f"{test.replace('.', '/')}.py" for test in tests]
    pytest = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    command = ["timeout", str(seconds), sys.executable, *prefix, *pytest]
    here = {**os.environ, "PYTHONPATH": str(checkout), **environment}
    return subprocess.run(command, cwd=checkout, env=here, capture_output=True, check=False).returncode == 0


def run_lines(checkout: Path, path: Path, tests: list[str]) -> set[int]:
    """Return the lines of the file that these tests run. Raises ClickException if the tests fail."""
    data = coverage.CoverageData(str(checkout / ".run-lines"))
    options = [f"--data-file={data.base_filename()}", f"--include={path}", "--rcfile="]
    if tests and not passes(checkout, tests, "-m", "coverage", "run", *options):
        raise click.ClickException("these tests fail without any mutant: " + " ".join(tests))
    data.read()
    return set(data.lines(str(checkout / path)) or ())


def git(*arguments: str) -> str:
    """Return what git prints. Raises ClickException, after git has said why."""
    done = subprocess.run(["git", *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise click.ClickException(f"git {arguments[0]} failed")
    return done.stdout.strip()


def changed_lines(base: str, commit: str) -> dict[Path, set[int]]:
    """Return the lines of each Python file of the sources that another commit has changed or added since ``base``."""
    lines: dict[Path, set[int]] = {}
    for line in git("diff", "--unified=0", "--no-ext-diff", base, commit, "--", *SOURCES).splitlines():
        if line.startswith("+++ "):
            path = Path(line.removeprefix("+++ b/"))
        elif (hunk := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line)) and path.suffix == ".py":
            start, count = int(hunk[1]), int(hunk[2] or 1)
            lines.setdefault(path, set()).update(range(start, start + count))
    return lines


def difference(code: str, mutated: str) -> str:
    """Return the lines that differ, before and after."""
    lines = list(difflib.unified_diff(code.splitlines(), mutated.splitlines(), lineterm="", n=0))[3:]
    return "  →  ".join(" ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")


@click.command(help="Change the lines that differ from the commit BASE, one by one, and run unit tests.")
@click.argument("base")
def main(base: str) -> None:
    """Try each mutant, print the survivors, and exit with 1 if there are any."""
    commit = git("stash", "create") or "HEAD"
    graph = grimp.build_graph(*SOURCES, "tests", cache_dir=None)
    survivors = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        git("archive", "--output", f"{folder}/checkout.tar", commit)
        copy = Path(folder) / "copy"
        shutil.unpack_archive(f"{folder}/checkout.tar", copy)
        for path, lines in changed_lines(base, commit).items():
            module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            began, tests, code = time.monotonic(), importing(module, graph), (copy / path).read_text()
            tested = lines & run_lines(copy, path, tests)
            patience = 60 + 4 * (time.monotonic() - began)
            click.echo(f"{path}: unit tests run {len(tested)} of {len(lines)} changed lines")
            for line, mutated in mutants(code, tested):
                (copy / path).write_text(mutated)
                tried += 1
                if passes(copy, tests, seconds=patience, PYTHONDONTWRITEBYTECODE="1"):
                    survivors += 1
                    click.echo(f"{path}:{line}: {difference(code, mutated)}")
            (copy / path).write_text(code)
    click.echo(f"{survivors} of {tried} mutants survived")
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main()
