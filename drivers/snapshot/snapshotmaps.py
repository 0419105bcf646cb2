"""Read-only maps over the volumes of snapshots. Each reader has a map of its own while it reads.

The kernel deletes no volume that has a map (Linux: drivers/md/dm-thin-metadata.c, __delete_device). So a snapshot that
is read is not deleted, also while a program of a killed agent reads it.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from drivers.errors import DiskInUse
from drivers.kernel import devmapper

SNAPSHOT_PREFIX = "virtman-snapshot-"


class SnapshotMaps:
    """The maps of this process, by name. Calls come one at a time, and raise NotOurs, CommandFailed, OSError."""

    def __init__(self) -> None:
        self._read: set[str] = set()

    def enter(self, number: int, table: str) -> Path:
        """Make a map over a volume. Returns its node."""
        name = f"{SNAPSHOT_PREFIX}{number}-{secrets.token_hex(4)}"
        path = devmapper.create(name, [table], read_only=True)
        self._read.add(name)
        return path

    def leave(self, path: Path) -> None:
        """Remove a map, as soon as no program has it open."""
        self._read.discard(path.name)
        devmapper.remove_when_closed(path.name)

    def clear(self, vm: str, number: int) -> None:
        """Remove the maps that nobody reads from a volume of a VM. Raises DiskInUse if somebody reads one."""
        for name in devmapper.names(f"{SNAPSHOT_PREFIX}{number}-"):
            if name in self._read or devmapper.openers(name):
                raise DiskInUse(vm)
            devmapper.remove(name)

    def remove_orphans(self) -> None:
        """Remove the maps of killed agents, as soon as no program has them open."""
        for name in devmapper.names(SNAPSHOT_PREFIX) - self._read:
            devmapper.remove_when_closed(name)
