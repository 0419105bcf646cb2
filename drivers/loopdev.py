"""Loop devices over files (losetup(8)). All calls are idempotent."""

from __future__ import annotations

import json
from pathlib import Path

from drivers.command import run


def attach(file: Path, *, read_only: bool = False, direct: bool = True) -> Path:
    """The loop device of a file or a device, made if there is none. ``direct``: past the page cache of the file.

    Raises CommandFailed, ToolMissing.
    """
    found = device_of(file)
    if found is not None:
        return found
    options = [*(["--read-only"] if read_only else []), *(["--direct-io=on"] if direct else [])]
    return Path(run(["losetup", "--find", "--show", *options, str(file)]).stdout.strip())


def detach(file: Path) -> None:
    """Remove the loop device of a file; its user must have closed it. Raises CommandFailed."""
    found = device_of(file)
    if found is not None:
        run(["losetup", "--detach", str(found)])


def device_of(file: Path) -> Path | None:
    """The loop device of a file, if there is one. Raises CommandFailed."""
    for device, backing in _devices().items():
        if backing == str(file):
            return device
    return None


def files() -> frozenset[Path]:
    """The files that have a loop device. Raises CommandFailed."""
    return frozenset(Path(backing) for backing in _devices().values())


def _devices() -> dict[Path, str]:
    said = run(["losetup", "--list", "--json", "--output", "NAME,BACK-FILE"]).stdout
    rows = json.loads(said)["loopdevices"] if said.strip() else []
    return {Path(row["name"]): row["back-file"] for row in rows}
