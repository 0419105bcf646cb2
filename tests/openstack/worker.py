"""Runs tests in this process, and writes what became of each, one line of JSON for each, into a file.

    python -m tests.openstack.worker FILE [--options-on] NAME...

A name is that of a package, a module, a class or a test; NAME:WORD|WORD are the tests of NAME whose own names have one
of the words. Nova's cases need a runner that knows testtools: pytest takes what they expect to fail for failed.
``--options-on``: the options of the patch are on where a test does not set them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import unittest
from pathlib import Path
from typing import Any, TextIO

OPTIONS = ("use_vmtsnapshot", "use_cachegroup")


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


def named(name: str) -> unittest.TestSuite:
    """The tests of NAME or NAME:WORD|WORD."""
    name, _, words = name.partition(":")
    loader = unittest.TestLoader()
    loader.testNamePatterns = [f"*.test_*{word}*" for word in words.split("|")] if words else None
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of a class or a test
        spec = None
    is_package = spec is not None and spec.submodule_search_locations is not None
    return loader.discover(name) if is_package else loader.loadTestsFromName(name)


def main(file: str, *words: str) -> None:
    """Run all tests, however they end."""
    sys.argv[1:] = []  # Nova reads it when it is imported
    from nova import monkey_patch

    monkey_patch.patch()  # as Nova's programs do, before anything else of Nova
    names = [word for word in words if word != "--options-on"]
    if names != [*words]:
        from nova.virtman import conf
        from oslo_config import cfg

        cfg.set_defaults(conf.OPTIONS, **dict.fromkeys(OPTIONS, True))
    with Path(file).open("w") as out:
        unittest.TestSuite(map(named, names)).run(Lines(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
