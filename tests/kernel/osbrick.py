"""os-brick, by which Nova reaches volumes, for guests: their Python is of the same release as this machine's."""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path

from lab.tools import BUILD, run

VERSION = "7.1.1"


@functools.cache
def folder() -> Path:
    """A folder with os-brick and all that it needs, installed now if it is not there."""
    kept = BUILD / f"os-brick-{VERSION}"
    if not kept.exists():
        fresh = kept.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, "--target", fresh, f"os-brick=={VERSION}"])
        fresh.rename(kept)
    return kept
