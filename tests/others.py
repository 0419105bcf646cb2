"""Calls that another user makes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from testtools import TestCase

from tests.patience import PATIENCE

NOBODY = 65534
GROUP = "daemon"
"""A group that every Debian has, and nobody is in."""


def as_nobody(test: TestCase, act: Callable[[], object], groups: Sequence[int] = ()) -> str:
    """What a call comes to that nobody makes: what it returns, or the class of its error and what it says.

    A process of its own makes it, which has all that this one has imported, also if nobody may read the checkout. Skips
    unless root runs the tests.
    """
    if os.geteuid() != 0:
        test.skipTest("only root can be somebody else")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE))
        try:
            os.setgroups(groups)
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                said = str(act())
            except Exception as error:  # noqa: BLE001  the test is told
                said = f"{type(error).__name__}: {error}"
            os.write(writing, said.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said
