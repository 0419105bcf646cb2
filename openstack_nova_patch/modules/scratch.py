"""Folders for large files of a moment. One whose maker was killed is removed by the next process of its host.

Whoever made a folder holds a lock of it, which goes with his process. Other hosts, which may share the file system, do
not see that lock (Linux: fs/nfs, where a folder has none), and leave folders alone that do not have their name.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nova.conf

CONF = nova.conf.CONF

_GRACE = 60.0
"""Seconds for a folder that was made to be locked."""


@contextmanager
def folder(parent: str) -> Iterator[Path]:
    """A new folder in one of those that ``look_after`` looks into."""
    with tempfile.TemporaryDirectory(dir=parent, prefix=_prefix()) as made, _locked(made, 0):
        yield Path(made)


def look_after() -> None:
    """Remove what nobody holds any more."""
    for parent in (CONF.instances_path, CONF.libvirt.snapshots_directory):
        for found in Path(parent).glob(f"{glob.escape(_prefix())}*"):
            with contextlib.suppress(OSError), _locked(found, fcntl.LOCK_NB):  # it is locked, gone, or not ours
                if found.stat().st_mtime < time.time() - _GRACE:
                    shutil.rmtree(found, ignore_errors=True)


def _prefix() -> str:
    return f"virtman-{CONF.host}-"


@contextmanager
def _locked(path: str | Path, how: int) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(descriptor)
