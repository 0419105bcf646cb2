"""What all benchmarks' command lines have in common."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import click

from benchmarks.errors import BenchmarkError, Failed
from benchmarks.figures import machine, write_json
from benchmarks.processes import say
from lab.errors import LabError
from virtman.errors import VirtmanError
from volt.errors import VoltError

EXPECTED = (BenchmarkError, LabError, VirtmanError, VoltError)
"""What may go wrong, as opposed to mistakes in the program."""

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


def finish(name: str, figures: Mapping[str, Any], failures: Sequence[str]) -> None:
    """Write the figures to ``build/<name>.json``, and end with exit code 1 if something went wrong."""
    say(f"written to {write_json(name, {'machine': machine(), **figures, 'failures': failures})}")
    if failures:
        raise Failed("; ".join(failures))


def _told_to_end(number: int, _frame: FrameType | None) -> None:
    say(f"ended by {signal.Signals(number).name}; cleaning up")
    sys.exit(128 + number)


@contextlib.contextmanager
def benchmark() -> Iterator[None]:
    """Around a benchmark: SIGTERM ends it with its clean-up, as Ctrl-C does, and errors of ours are one line."""
    signal.signal(signal.SIGTERM, _told_to_end)
    try:
        yield
    except EXPECTED as error:
        raise click.ClickException(" ".join(str(error).split())) from error
