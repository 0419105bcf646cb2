"""The multipath map by which a host reads one image: a disk for each parent, in the parents' order.

The map exists before any parent is reached, and holds reads while it has no path. A disk that cannot be read stays in
the map as a failed path, and is reinstated by a message: another table would wait for all reads below the map.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from drivers.base import FAILOVER, Image
from drivers.errors import BadDisk
from drivers.kernel import devmapper, multipath
from drivers.kernel.devmapper import SECTOR
from drivers.kernel.multipath import Groups

log = logging.getLogger(__name__)

PREFIX = "virtman-attach-"


class ParentsMap:
    """The map of one image. One thread at a time may change it."""

    def __init__(self, image: Image, policy: str) -> None:
        """Nothing is made yet. ``policy``: see ``Place.path_policy``. Raises BadDisk."""
        if image.size % SECTOR:
            raise BadDisk(f"image {image.name}: {image.size} bytes are not whole sectors")
        self.name = PREFIX + image.name
        self._image, self._policy = image, policy
        self._said: Groups = []
        """The good paths, as the log has them."""

    def open(self) -> bool:
        """Make the map, or go on with the map of an earlier driver object, then return true. Raises CommandFailed."""
        found = devmapper.exists(self.name)
        devmapper.create(self.name, [table_of(self._image, self._policy, [])], read_only=True)
        if found and multipath.HOLDS not in (table := devmapper.table(self.name)):  # it was abandoned
            devmapper.message(self.name, multipath.HOLDS)
            multipath.reinstate(self.name, devmapper.numbers_in(table))
        return found

    def state(self) -> multipath.State:
        """How the map reads now. Raises OSError."""
        return multipath.state(self.name)

    def read_by(self, disks: Sequence[str], last: int, kept: Collection[str]) -> None:
        """Read by these disks, in this order, the ``last`` so many only when no other can be read.

        ``kept``: disks that cannot be read now; they stay as failed paths while no other table is needed.
        Raises CommandFailed, CommandTimedOut, NotOurs, OSError.
        """
        groups = groups_of(self._policy, disks, last)
        if groups != self._said:
            log.info("image %s: paths are now %s", self._image.name, ", ".join(disks) or "none; reads wait")
            self._said = groups
        state = self.state()
        if state.without(kept) != groups:
            devmapper.reload(self.name, [table_of(self._image, self._policy, groups)], read_only=True)
            return
        multipath.fail(self.name, state.good.intersection(kept))
        multipath.reinstate(self.name, state.failed.intersection(disks))
        first = next((place for place, group in enumerate(state.groups, 1) if set(group) & set(disks)), state.group)
        if first != state.group:  # else the map would stay with the next best
            multipath.switch_to(self.name, first)


def groups_of(policy: str, disks: Sequence[str], last: int) -> Groups:
    """A map reads by the disks of one group, and by those of the next when all of the first have failed."""
    if policy == FAILOVER:
        return [[disk] for disk in disks]
    good = len(disks) - last
    return [list(part) for part in (disks[:good], disks[good:]) if part]


def table_of(image: Image, policy: str, groups: Groups) -> str:
    """Reads by these disks; without any, reads wait."""
    selector = "service-time" if policy == FAILOVER else policy
    return multipath.table(image.size // SECTOR, groups, selector, holds=True, requests=True)


def fail_reads(name: str) -> None:
    """Have a map hold no reads any more, and fail those that wait. Raises NotOurs, CommandFailed, OSError."""
    devmapper.message(name, multipath.FAILS)
    # What one parent gives back is not for the next one.
    multipath.fail(name, devmapper.numbers_in(devmapper.table(name)))
