"""Requests by fio: its command line, and what it says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.errors import Failed

Options = Mapping[str, object]


def command(options: Options) -> list[str]:
    """fio's command line for one job, past the page cache."""
    every = {"name": "vm", "direct": 1, "output-format": "json", **options}
    return ["fio", *(f"--{name}={value}" for name, value in every.items())]


def seconds(said: str) -> float:
    """How long its job took. Raises Failed."""
    return float(_job(said)["job_runtime"]) / 1000


def read_seconds(said: str, depth: int) -> float:
    """A read's share of the time, in the mean, of ``depth`` at once. Raises Failed."""
    return float(_job(said)["read"]["lat_ns"]["mean"]) / 1e9 / depth


def reads_per_second(said: str) -> float:
    """Over the whole job. Raises Failed."""
    return float(_job(said)["read"]["iops"])


def _job(said: str) -> dict[str, Any]:
    [job] = json.loads(said[said.index("{") :])["jobs"]  # engines say something before
    if job["error"]:
        raise Failed(f"fio: error {job['error']}")
    return dict(job)
