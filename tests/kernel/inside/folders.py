"""Where tests in a guest have their files."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from testtools import TestCase

from drivers.names import STATE


def state_folder(case: TestCase) -> Path:
    """A new empty folder where an agent has its files, removed after the test."""
    STATE.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=STATE, prefix="test-"))
    case.addCleanup(shutil.rmtree, folder)
    return folder
