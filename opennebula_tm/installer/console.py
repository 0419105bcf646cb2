"""The terminal, and the commands of others."""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from opennebula_tm.installer.errors import Refused

PATIENCE = 60
"""Seconds that another program may take."""


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it wrote. ``code`` is None if there is no such command, or it took too long."""

    code: int | None
    out: str = ""
    error: str = ""


class Commands:
    """Runs commands of others; tests have another one."""

    def run(self, argv: Sequence[str]) -> Done:
        """Run it to its end."""
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False
            )
        except FileNotFoundError:
            return Done(None, error=f"{argv[0]} is not installed")
        except subprocess.TimeoutExpired:
            return Done(None, error=f"{argv[0]} did not end within {PATIENCE} s")
        return Done(done.returncode, done.stdout, done.stderr.strip())

    def must(self, argv: Sequence[str]) -> None:
        """Run it. Raises Refused unless it succeeds."""
        done = self.run(argv)
        if done.code != 0:
            raise Refused(f"{' '.join(argv)}: {done.error or 'it failed'}")


class Console:
    """Says and asks. ``agreed``: --yes was given."""

    def __init__(self, agreed: bool = False, source: TextIO = sys.stdin, out: TextIO = sys.stdout) -> None:
        self._agreed = agreed
        self._source = source
        self._out = out

    def say(self, line: str = "") -> None:
        """One line for whoever runs the installer."""
        print(line, file=self._out)

    def diff(self, path: Path, old: str, new: str) -> None:
        """Show how a file would change."""
        for line in difflib.unified_diff(_lines(old), _lines(new), str(path), f"{path} (new)", lineterm=""):
            self.say(line.encode("utf-8", "backslashreplace").decode())

    def agree(self, question: str) -> None:
        """Ask. Raises Refused if the answer is not yes, or nobody is there to ask."""
        if self._agreed:
            return
        if not self._source.isatty():
            raise Refused("there is no terminal to ask at; --yes answers. Nothing was changed")
        self._out.write(f"{question} [y/N] ")
        self._out.flush()
        if self._source.readline().strip().lower() not in ("y", "yes"):
            raise Refused("nothing was changed")


def _lines(text: str) -> list[str]:
    """Lines as they are shown: without what ends them, but for a carriage return, which is shown by its name."""
    return [line.replace("\r", "\\r") for line in text.split("\n")]
