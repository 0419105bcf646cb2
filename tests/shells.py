"""Run shellcheck over the shell scripts of OpenNebula and of its stand: python -m tests.shells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
FOLDERS = (CHECKOUT / "opennebula_tm", CHECKOUT / "lab" / "opennebula")


def is_script(path: Path) -> bool:
    """Tell whether a file begins with the name of a shell, or has a name that says so."""
    return path.is_file() and (path.suffix == ".sh" or path.read_bytes().startswith((b"#!/bin/sh", b"#!/bin/bash")))


def main() -> int:
    """Returns shellcheck's exit code."""
    scripts = [path for folder in FOLDERS for path in sorted(folder.rglob("*")) if is_script(path)]
    return subprocess.run(["shellcheck", *scripts], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
