"""Device-mapper maps by name (dmsetup(8)). All calls are idempotent."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from drivers.command import run
from drivers.errors import CommandFailed

SECTOR = 512
"""Bytes: device-mapper counts in sectors of this size, whatever the disk's are."""


def map_path(name: str) -> Path:
    """The node of a map."""
    return Path("/dev/mapper") / name


def create(name: str, table: Iterable[str], *, read_only: bool = False) -> Path:
    """Make a map of these lines, unless there is one of this name. Returns its node.

    udev's rules do not look at it: a probe of a map that waits for its parents would hang, and each probe reads.

    Raises CommandFailed, CommandTimedOut, ToolMissing.
    """
    if not exists(name):
        options = ["--readonly"] if read_only else []
        with tempfile.NamedTemporaryFile("w", suffix=".table") as file:  # --table takes a single line only
            file.writelines(f"{line}\n" for line in table)
            file.flush()
            run(["dmsetup", "create", name, "--noudevrules", "--noudevsync", *options, file.name])
    return map_path(name)


def remove(name: str) -> None:
    """Remove a map; its user must have closed it. Raises CommandFailed, CommandTimedOut."""
    if exists(name):
        run(["dmsetup", "remove", "--noudevrules", "--noudevsync", "--retry", name])


def message(name: str, text: str) -> None:
    """Send a message to the first target of a map. Raises CommandFailed."""
    run(["dmsetup", "message", name, "0", text])


def status(name: str) -> str:
    """The status line of a map's target: start, length, type, and what that type says. Raises CommandFailed."""
    return run(["dmsetup", "status", name]).stdout.strip()


def exists(name: str) -> bool:
    """Whether there is a map of this name."""
    try:
        run(["dmsetup", "info", name])
    except CommandFailed:
        return False
    return True


def names(prefix: str) -> frozenset[str]:
    """The maps whose names begin like this. Raises CommandFailed."""
    # Without any map dmsetup says so on a line of its own, which has no colon or tab.
    lines = run(["dmsetup", "info", "--columns", "--noheadings", "--options", "name,minor", "--separator", ":"]).stdout
    found = (line.partition(":")[0] for line in lines.splitlines() if ":" in line)
    return frozenset(name for name in found if name.startswith(prefix))
