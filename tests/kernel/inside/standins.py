"""Programs that do something else before they do what they are told."""

from __future__ import annotations

import os
from pathlib import Path

from testtools import TestCase

from drivers.host.command import tool


def stand_in(test: TestCase, folder: Path, name: str, before: str) -> None:
    """Have a program run this piece of shell script first, until the test ends. ``folder`` is the test's own."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / name).write_text(f'#!/bin/sh\n{before}\nexec {tool(name)} "$@"\n')
    (programs / name).chmod(0o755)
    test.addCleanup(os.environ.__setitem__, "PATH", os.environ["PATH"])
    os.environ["PATH"] = f"{programs}:{os.environ['PATH']}"
