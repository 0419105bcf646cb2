"""Run shellcheck over OpenNebula's scripts, those that a shell runs: python -m tests.shells."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "opennebula_tm"


def scripts(folder: Path = FOLDER) -> Iterator[Path]:
    """All files that begin with the name of a shell, or have a name that says so."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (path.suffix == ".sh" or path.read_bytes().startswith((b"#!/bin/sh", b"#!/bin/bash"))):
            yield path


def main() -> int:
    """Returns shellcheck's exit code."""
    return subprocess.run(["shellcheck", *scripts()], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
