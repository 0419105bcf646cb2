"""How far the cache files of storage daemons may grow.

QEMU's copy-on-read keeps whatever is read, until the file system is full and VMs that write stop. So each daemon has a
limit for the size of its files (setrlimit(2), RLIMIT_FSIZE), which is set anew while the daemon runs (prlimit(2)). A
cache file grows at its end alone. A write behind the limit fails at once (EFBIG), as on a full file system, and the
parents answer the read (drivers/cache/qcow2.py). The daemons share half of the spare space; the other half is for what
VMs write until the limits are set anew. So a daemon whose agent has died takes no more than its last share.

The daemons inherit from Python that they ignore SIGXFSZ, which comes with EFBIG.
"""

from __future__ import annotations

import contextlib
import json
import resource
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivers.base import BlockNode
from drivers.host.space import Room
from drivers.qemu.daemon import Daemon

EVERY = 1.0
"""Seconds after which the limits are set anew."""


class Growth:
    """Limits the daemons of one host. ``node``: QEMU's name of a cache's node in them."""

    def __init__(self, room: Room, node: str) -> None:
        self._room, self._node = room, node
        self._lock = threading.Lock()
        self._files: dict[Daemon, Path] = {}

    def add(self, daemon: Daemon) -> None:
        """Limit a daemon from now on, until it ends. One without a cache writes nothing. Raises OSError."""
        blockdevs = (json.loads(argument) for argument in daemon.argv if argument.startswith("{"))
        cache = next(filter(None, (find(node, self._node) for node in blockdevs)), None)
        if cache is not None:
            with self._lock:
                self._files[daemon] = Path(cache["file"]["filename"])
            self.share_out()

    def share_out(self) -> bool:
        """Set all limits anew. Returns whether there is a daemon with a cache. Raises OSError."""
        with self._lock:
            self._files = {daemon: file for daemon, file in self._files.items() if not daemon.ended()}
            for daemon, file in self._files.items():
                _limit(daemon, file, self._room.spare(file.parent) // 2 // len(self._files))
            return bool(self._files)


def find(node: Any, name: str) -> BlockNode | None:
    """The node of a name in a node with all below it."""
    if isinstance(node, Mapping):
        return node if node.get("node-name") == name else find([*node.values()], name)
    if isinstance(node, Sequence) and not isinstance(node, str):
        return next(filter(None, (find(value, name) for value in node)), None)
    return None


def _limit(daemon: Daemon, file: Path, growth: int) -> None:
    """Let a daemon's cache file grow by ``growth`` bytes. Raises OSError."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # removed, or ended, at this moment
        size = file.stat().st_size + growth
        _set(daemon, size)
        if (grown := file.stat().st_size) > size:  # between the two: tables behind the limit could not be written
            _set(daemon, grown)


def _set(daemon: Daemon, size: int) -> None:
    _, most = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
    if most == resource.RLIM_INFINITY or size < most:  # else the administrator has limited the agent already
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (size, most))
