"""Copying what a layer holds into the one above it, while a QEMU has both open (QEMU: block-stream).

A QEMU has one such job at a time; an agent that was killed may have left it behind. Until the job is finalized the
header of the upper layer names the lower one, so cancelling the job leaves all as it was.

QEMU changes the header before it has written its tables of the copied data. Killed within the next seconds, it loses
that data (seen with 7.2). So the job waits for a flush before its end. The one command that flushes a node of a storage
daemon as well as of a VM is to reopen the node unchanged (QEMU: block.c, bdrv_reopen_prepare); for that the node needs
a name that its maker gave.
"""

from __future__ import annotations

import contextlib
import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

from drivers.base import Monitor
from drivers.errors import DiskFull, MonitorFailed
from drivers.host import retry
from drivers.qemu.nodes import Nodes

JOB = "virtman-stream"

STALL = 120.0
"""Seconds without any progress after which a job is given up."""

_PENDING, _CONCLUDED = "pending", "concluded"

_Job = dict[str, Any]
"""QEMU: qapi/job.json, JobInfo."""


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
        job = _await(monitor, _PENDING, _CONCLUDED)
        if job["status"] == _PENDING:
            monitor.execute("blockdev-reopen", {"options": [nodes.as_it_is(name)]})
            monitor.execute("job-finalize", {"id": JOB})
            job = _await(monitor, _CONCLUDED)
    except MonitorFailed:
        with contextlib.suppress(MonitorFailed):
            settle(monitor)
        raise
    monitor.execute("job-dismiss", {"id": JOB})
    nodes.refresh()
    nodes.write_no_more(name)
    if error := job.get("error"):
        raise _translated(str(error), upper)


def settle(monitor: Monitor) -> None:
    """End a job that an agent left behind. Raises MonitorFailed."""
    job = _find(monitor)
    if job is None:
        return
    if job["status"] != _CONCLUDED:
        with contextlib.suppress(MonitorFailed):  # it ends at this moment
            monitor.execute("job-cancel", {"id": JOB})
        _await(monitor, _CONCLUDED)
    monitor.execute("job-dismiss", {"id": JOB})


def _find(monitor: Monitor) -> _Job | None:
    return next((job for job in monitor.execute("query-jobs") if job["id"] == JOB), None)


def _await(monitor: Monitor, *wanted: str) -> _Job:
    """The job, once it has one of these states. Raises MonitorFailed if it is gone or stalls."""
    job = _changed(monitor, None)
    while job is not None and job["status"] not in wanted:
        job = retry.until(partial(_changed, monitor, job), limit=STALL)
    if job is None:
        raise MonitorFailed("block-stream", f"no progress in {STALL:g} s")
    return job


def _changed(monitor: Monitor, before: _Job | None) -> _Job | None:
    """The job, if its state or progress differs from ``before``. Raises MonitorFailed if it is gone."""
    job = _find(monitor)
    if job is None:
        raise MonitorFailed("query-jobs", f"the job {JOB} is gone")
    return None if job == before else job


def _translated(error: str, path: Path) -> MonitorFailed | DiskFull:
    if os.strerror(errno.ENOSPC) in error:
        return DiskFull(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)))
    return MonitorFailed("block-stream", error)
