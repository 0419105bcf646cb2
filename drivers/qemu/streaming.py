"""Copying what a layer holds into the one above it, while a QEMU has both open (QEMU: block-stream).

There is one such job at a time in a QEMU; an agent that died may have left it behind. Until it is finalized the header
of the upper layer names the lower one, so cancelling it at any time leaves all as it was.

QEMU changes the header without having written its tables of what was copied: killed within the next seconds, it has
lost that (seen with 7.2). So the job waits for a flush before its end. The one command that flushes a node of a storage
daemon as well as of a VM is to reopen it as it is (QEMU: block.c, bdrv_reopen_prepare); the node must have been given a
name by whoever made it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

from drivers.base import Monitor
from drivers.errors import DiskFull, MonitorFailed
from drivers.qemu.nodes import Nodes

JOB = "virtman-stream"

STALL = 120.0
"""Seconds without any progress after which a job is given up."""

_PENDING, _CONCLUDED = "pending", "concluded"
_SHORTEST, _LONGEST = 0.01, 0.5
"""Seconds between two looks at a job."""


def stream(nodes: Nodes, upper: Path, lower: Path, backing: str) -> None:
    """Copy the lower layer, next below the upper one, into that; ``backing`` is what its header names from then on.

    Raises MonitorFailed, DiskFull.
    """
    monitor = nodes.monitor
    name = nodes.demand(upper)
    arguments = {
        "job-id": JOB,
        "device": name,
        "base-node": nodes.backing(nodes.demand(lower)),
        "backing-file": backing,
        "on-error": "report",
        "auto-finalize": False,
        "auto-dismiss": False,
    }
    monitor.execute("block-stream", arguments)
    try:
        if _await(monitor, _PENDING, _CONCLUDED) == _PENDING:
            monitor.execute("blockdev-reopen", {"options": [nodes.as_it_is(name)]})
            monitor.execute("job-finalize", {"id": JOB})
            _await(monitor, _CONCLUDED)
    except MonitorFailed:
        with contextlib.suppress(MonitorFailed):
            settle(monitor)
        raise
    error = (_job(monitor) or {}).get("error")
    monitor.execute("job-dismiss", {"id": JOB})
    nodes.look()
    nodes.write_no_more(name)
    if error:
        raise _translated(str(error), upper)


def settle(monitor: Monitor) -> None:
    """End a job that somebody left behind. Raises MonitorFailed."""
    job = _job(monitor)
    if job is None:
        return
    if job["status"] != _CONCLUDED:
        with contextlib.suppress(MonitorFailed):  # it ends at this moment
            monitor.execute("job-cancel", {"id": JOB})
        _await(monitor, _CONCLUDED)
    monitor.execute("job-dismiss", {"id": JOB})


def _job(monitor: Monitor) -> dict[str, Any] | None:
    return next((job for job in monitor.execute("query-jobs") if job["id"] == JOB), None)


def _await(monitor: Monitor, *wanted: str) -> str:
    pause, seen, since = _SHORTEST, None, time.monotonic()
    while True:
        job = _job(monitor)
        if job is None:
            raise MonitorFailed("query-jobs", f"the job {JOB} is gone")
        if job["status"] in wanted:
            return str(job["status"])
        if seen != (seen := (job["status"], job["current-progress"])):
            since = time.monotonic()
        elif time.monotonic() - since > STALL:
            raise MonitorFailed("block-stream", f"no progress in {STALL:g} s")
        threading.Event().wait(pause)
        pause = min(2 * pause, _LONGEST)


def _translated(error: str, path: Path) -> MonitorFailed | DiskFull:
    if os.strerror(errno.ENOSPC) in error:
        return DiskFull(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)))
    return MonitorFailed("block-stream", error)
