"""Read-only maps over the volumes of snapshots, for programs of this host to read what a snapshot keeps.

A map is named after its volume, and is there while somebody reads it. One that a killed agent left is used by the next
reader of that snapshot, and removed by the next agent, or with the snapshot: the kernel deletes no volume that has a
map (Linux: drivers/md/dm-thin-metadata.c, __delete_device).
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

from drivers.errors import DiskInUse, DriverError
from drivers.kernel import devmapper

log = logging.getLogger(__name__)

SNAPSHOT_PREFIX = "virtman-snapshot-"


class SnapshotMaps:
    """The maps, by the numbers of their volumes, and how many of this process read each. Calls come one at a time."""

    def __init__(self) -> None:
        self._readers: Counter[str] = Counter()

    def enter(self, number: int, table: str) -> Path:
        """Begin to read: the map's node. Raises NotOurs, CommandFailed, CommandTimedOut."""
        name = _name(number)
        path = devmapper.create(name, [table], read_only=True)
        self._readers[name] += 1
        return path

    def leave(self, number: int) -> None:
        """End reading. Who was last removes the map."""
        name = _name(number)
        self._readers -= Counter([name])  # which forgets those that nobody reads
        if name not in self._readers:
            _remove_or_leave(name)

    def clear(self, vm: str, number: int) -> None:
        """Have no map over a volume of a VM. Raises DiskInUse if anybody reads it, NotOurs, CommandFailed."""
        name = _name(number)
        if self._is_read(name):
            raise DiskInUse(vm)
        devmapper.remove(name)

    def sweep(self) -> None:
        """Remove the maps of agents that were killed."""
        for name in devmapper.names(SNAPSHOT_PREFIX) - self._readers.keys():
            log.info("the map %s is removed: an agent was killed while it, or a program of its, read it", name)
            _remove_or_leave(name)

    def _is_read(self, name: str) -> bool:
        return name in self._readers or (devmapper.exists(name) and devmapper.openers(name) > 0)


def _remove_or_leave(name: str) -> None:
    """Remove a map, now or later: nobody's call fails because a program still has it open."""
    try:
        devmapper.remove(name)
    except (DriverError, OSError) as error:
        log.warning("the map %s is removed later: %s", name, error)


def _name(number: int) -> str:
    return f"{SNAPSHOT_PREFIX}{number}"
