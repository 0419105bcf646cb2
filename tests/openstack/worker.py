"""Runs tests in this process, and writes what became of each, one line of JSON for each, into a file.

    python -m tests.openstack.worker FILE [--default GROUP.OPTION=VALUE]... NAME...

A name is that of a package, a module, a class or a test; NAME:PATTERN are the tests of NAME in whose own name the
pattern is found. Nova's cases need a runner that knows testtools: pytest takes what they expect to fail for failed.
``--default``: what an option of Nova is where a test does not set it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import sys
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


class Lines(unittest.TestResult):
    """Writes a line for each test: its id, the outcome, seconds, and for one that went wrong why."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file
        self._began = time.monotonic()

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.monotonic()

    def _line(self, test: Any, outcome: str, why: str = "") -> None:
        seconds = round(time.monotonic() - self._began, 3)
        line = {"test": test.id(), "outcome": outcome, "seconds": seconds, "why": why}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._line(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._line(test, "skipped", reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._line(test, "passed", str(err[1]))

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._line(test, "failed", "it was expected to fail")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._line(test, "failed", self.failures[-1][1])

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._line(test, "failed", self.errors[-1][1])

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._line(subtest, "failed", (self.failures + self.errors)[-1][1])


def modules(name: str) -> Iterator[str]:
    """The name, or if it is a package's those of all modules of tests in it."""
    try:
        found = importlib.import_module(name)
    except ImportError:  # of a class or a test; or it cannot be imported, which the loader says
        yield name
        return
    if not hasattr(found, "__path__"):
        yield name
        return
    for module in pkgutil.walk_packages(found.__path__, f"{name}."):
        if module.name.rpartition(".")[2].startswith("test_"):
            yield module.name


def tests_in(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Each single test."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from tests_in(test)
        else:
            yield test


def matches(test: unittest.TestCase, pattern: str) -> bool:
    """Whether it is to be run. What stands for a module that cannot be imported always is."""
    return type(test).__module__ == "unittest.loader" or bool(re.search(pattern, test.id().rpartition(".")[2]))


def named(name: str) -> Iterator[unittest.TestCase]:
    """The tests of NAME or NAME:PATTERN."""
    name, _, pattern = name.partition(":")
    for test in tests_in(unittest.defaultTestLoader.loadTestsFromNames(list(modules(name)))):
        if matches(test, pattern):
            yield test


def set_default(setting: str) -> None:
    """Change an option's default, from GROUP.OPTION=VALUE. Raises ValueError if Nova has none of this name."""
    import nova.conf
    from oslo_config import cfg

    name, _, value = setting.partition("=")
    group, _, option = name.rpartition(".")
    modules = [module.name for module in pkgutil.iter_modules(nova.conf.__path__, "nova.conf.")]
    for module in [*modules, "nova.virtman.conf"]:
        listed: Any = getattr(importlib.import_module(module), "list_opts", dict)()
        for key, options in listed.items() if isinstance(listed, dict) else listed:
            found = [one for one in options if one.dest == option]
            if getattr(key, "name", key) == (group or "DEFAULT") and found:
                cfg.set_defaults(found, **{option: found[0].type(value)})
                return
    raise ValueError(f"Nova has no option {name}")


def main() -> int:
    """Returns 0 when all were run, however they ended."""
    parser = argparse.ArgumentParser(description="Run tests; results go to a file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--default", action="append", default=[], metavar="GROUP.OPTION=VALUE")
    parser.add_argument("names", nargs="+")
    chosen = parser.parse_args()
    sys.argv[1:] = []  # Nova reads it when it is imported
    from nova import monkey_patch

    monkey_patch.patch()  # as Nova's programs do, before anything else of Nova
    with chosen.file.open("w") as file:
        for setting in chosen.default:
            set_default(setting)
        wanted = [test for name in chosen.names for test in named(name)]
        unittest.TestSuite(wanted).run(Lines(file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
