"""Small file systems for tests: with little room, or on a disk of large sectors."""

from __future__ import annotations

import os
from pathlib import Path

from testtools import TestCase

from drivers.host.command import run


def small_file_system(case: TestCase, folder: Path, size: str, *, sector: int = 512) -> Path:
    """A mounted ext4 in a file of ``size`` in ``folder``, on a disk with sectors of so many bytes."""
    small, image = folder / "small", folder / "small.ext4"
    run(["truncate", "-s", size, str(image)])
    disk = run(["losetup", "--find", "--show", "--sector-size", str(sector), str(image)]).stdout.strip()
    case.addCleanup(run, ["losetup", "--detach", disk])
    run(["mke2fs", "-q", "-t", "ext4", disk])
    small.mkdir()
    run(["mount", disk, str(small)])
    case.addCleanup(run, ["umount", str(small)])
    case.addCleanup(run, ["udevadm", "settle"])  # it may have a device over a file there open for a look
    return small


def fill(folder: Path, *, but: int) -> Path:
    """A file that takes all the room of a file system but so many bytes."""
    ballast = folder / "ballast"
    with ballast.open("wb") as file:  # what an earlier one took is free then
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        os.posix_fallocate(file.fileno(), 0, free - but)
    return ballast
