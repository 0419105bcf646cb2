"""What all benchmarks' command lines have in common."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

import click

from benchmarks.errors import BenchmarkError
from lab.errors import LabError
from virtman.errors import VirtmanError
from volt.errors import VoltError

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


@contextlib.contextmanager
def benchmark() -> Iterator[None]:
    """Around a benchmark: SIGTERM ends it with its clean-up, as Ctrl-C does, and errors of ours are one line."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    except (BenchmarkError, LabError, VirtmanError, VoltError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error
