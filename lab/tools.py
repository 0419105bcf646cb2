"""Runs command-line tools for the lab, and knows where the lab keeps things."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from lab.errors import CommandFailed

CHECKOUT = Path(__file__).resolve().parent.parent
BUILD = CHECKOUT / "build"


def run(argv: Sequence[str | Path], *, stdin: str = "") -> str:
    """Run a tool to its end and return what it printed on standard output.

    Raises CommandFailed with both outputs if it ends with another exit code than 0.
    """
    words = [str(word) for word in argv]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommandFailed(words, done.returncode, done.stdout + done.stderr)
    return done.stdout
