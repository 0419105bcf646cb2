"""Whether a disk or partition may be taken: nobody uses it, and it holds nothing. And how it is marked then."""

from __future__ import annotations

import os
from pathlib import Path

from drivers.host import blockdev
from drivers.host.command import run

BEGINNING = 1 << 20
"""Bytes at the start of a device that must be zeros if nothing of ours is there."""


def objection(path: Path, *, marked: bool) -> str:
    """Why a device must not be taken; empty if it may be. ``marked``: what is there was made here.

    Raises OSError, CommandFailed, ToolMissing.
    """
    # First by a program, which has a limit: a disk that does not answer would hang this process.
    signatures = run(["wipefs", "--no-act", "--noheadings", "--output", "TYPE", str(path)]).stdout.split()
    with path.open("rb", buffering=0) as disk:  # udev looks at a disk anew that is closed by a writer
        begins, held = disk.read(BEGINNING), blockdev.is_held(disk.fileno())
    if held:
        return "it is mounted or in use"
    if signatures or (not marked and any(begins)):
        what = ", ".join(sorted(set(signatures))) or "something unknown"
        return f"it holds {what}; wipefs --all, and zeros in its first MiB, make it free if nobody needs that"
    return ""


def write(path: Path, *parts: bytes) -> None:
    """Write parts to the start of a file or device. Each part is there before the next one is written."""
    with path.open("r+b", buffering=0) as file:
        for part in parts:
            file.write(part)
            os.fsync(file.fileno())
