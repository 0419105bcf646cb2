"""What is logged while a test runs."""

from __future__ import annotations

import logging

from testtools import TestCase


class Logged(logging.Handler):
    """Keeps what a logger and those below it are told, with tracebacks; ``""`` is the logger above all."""

    def __init__(self, test: TestCase, logger: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        target = logging.getLogger(logger)
        before = target.level
        target.addHandler(self)
        target.setLevel(logging.DEBUG)
        test.addCleanup(target.setLevel, before)
        test.addCleanup(target.removeHandler, self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
