"""Disk space: files that take theirs at once, and what is left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from drivers.errors import NoSpace


def allocate(file: Path, size: int) -> None:
    """Make the file ``size`` bytes long, with all its disk space. What is new in it reads as zeros. Raises NoSpace."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        before = os.fstat(fd).st_size
        if before >= size:
            return
        try:
            os.posix_fallocate(fd, before, size - before)
        except OSError as error:
            os.ftruncate(fd, before)
            if not before:
                file.unlink()
            stat = os.statvfs(file.parent)
            raise NoSpace(file, stat.f_bavail * stat.f_frsize, size - before) from error
    finally:
        os.close(fd)


def shortage(folder: Path, needed: int) -> str:
    """What to tell of a file system with less than ``needed`` bytes free, and VMs' disks on it; nothing of others."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return str(error)
    if free >= needed:
        return ""
    return f"{folder} has {free >> 20} MiB free; VMs that write stop when it is full"
