"""Databases for tests, each a copy of one with Volt's tables: to make the tables takes longer than most tests do.

They are in memory: a busy disk takes its time for each transaction, and what it is to keep is tested elsewhere.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from testtools import TestCase

from volt.store import Store


def new_database(test: TestCase) -> str:
    """The URL of a database of the test's own. All have the same key."""
    folder = tempfile.mkdtemp(dir="/dev/shm")
    test.addCleanup(shutil.rmtree, folder)
    path = Path(folder) / "volt.db"
    path.write_bytes(_with_tables())
    return f"sqlite:///{path}"


@cache
def _with_tables() -> bytes:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "volt.db"
        Store(f"sqlite:///{path}").close()
        return path.read_bytes()
