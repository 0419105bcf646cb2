"""What the demos have in common around what they show: logs, figures, and what a person reads when one fails."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.errors import LabError
from lab.signals import terminating_is_interrupting
from lab.tools import BUILD
from virtman.errors import VirtmanError


def present(name: str, show: Callable[[Path], dict[str, Any]], trouble: str) -> int:
    """Run a demo in the empty folder ``build/NAME`` and write its figures to ``build/NAME.json``.

    Returns the exit code: 1 if the demo failed, or found anything that it counts as ``trouble``; 130 if interrupted.
    """
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    logging.basicConfig(filename=folder / "demo.log", level="INFO")
    started = time.monotonic()
    try:
        with terminating_is_interrupting():
            figures = show(folder)
    except (LabError, VirtmanError, subprocess.TimeoutExpired) as error:
        logging.getLogger(__name__).exception("the demo failed")
        print(f"demo: {error}\ndemo: the logs are in {folder}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; everything it started was stopped", file=sys.stderr)
        return 130
    figures["demo_s"] = time.monotonic() - started
    written = BUILD / f"{name}.json"
    written.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"written: {written}")
    return 1 if figures[trouble] else 0


def at_least_one(text: str) -> int:
    """A positive number of the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value
