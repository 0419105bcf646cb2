"""The paths of multipath maps: which have failed, and having a map read by them again, or not.

A path that failed stays in its map, which does not read by it until it is told to. That takes no time, where another
table waits for all reads that are on their way below the map.

Linux: drivers/md/dm-mpath.c. All of it is done at once: no process is needed (drivers/kernel/dmioctl.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from drivers.kernel import devmapper, dmioctl

HOLDS, FAILS = "queue_if_no_path", "fail_if_no_path"
"""What a map does with requests that it has no path for."""

Groups = Sequence[Sequence[str]]
"""Disks by their numbers, ``major:minor``. A map reads by those of a group while it can, and by the next one's then."""


def table(
    sectors: int, groups: Groups, selector: str = "round-robin", *, holds: bool = False, requests: bool = False
) -> str:
    """The table of a map, which reads by one disk of a group after the other, as the path selector says.

    ``holds``: the map keeps requests that it has no path for. ``requests``: it takes those of the block layer, and not
    bios (Linux: admin-guide/device-mapper/dm-queue-length, dm-service-time; drivers/md/dm-mpath.c).
    """
    features = [*([HOLDS] if holds else []), *([] if requests else ["queue_mode", "bio"])]
    told = [f"{selector} 0 {len(group)} 0 {' '.join(group)}" for group in groups]
    counts = f"{len(groups)} {min(1, len(groups))}"
    return " ".join([f"0 {sectors} multipath {len(features)}", *features, f"0 {counts}", *told])


@dataclass(frozen=True)
class State:
    """How a map reads: by all paths in ``groups`` but those that have ``failed``, and now by this ``group``.

    Groups are counted from 1; 0: it has none.
    """

    groups: Groups
    failed: frozenset[str]
    group: int

    @property
    def good(self) -> frozenset[str]:
        return frozenset(number for group in self.groups for number in group) - self.failed

    def without(self, numbers: Collection[str]) -> Groups:
        """The groups without these; one of which nothing is left is not there."""
        left = [[number for number in group if number not in numbers] for group in self.groups]
        return [group for group in left if group]


def state(name: str) -> State:
    """Of one map. Raises OSError."""
    return state_in(dmioctl.status(name))


def state_in(told: str) -> State:
    """What the kernel tells of a map (multipath_status). Of one of another kind: no groups."""
    words = iter(told.split())
    if list(islice(words, 3))[2:] != ["multipath"]:
        return State([], frozenset(), 0)
    for _of_its_queue_then_of_a_hardware_handler in range(2):
        _skip(words, int(next(words)))
    count, group = int(next(words)), int(next(words))
    groups = []
    for _ in range(count):
        next(words)  # whether it is in use
        _skip(words, int(next(words)))
        groups.append(dict(_paths(words, int(next(words)), int(next(words)))))
    failed = {number for paths in groups for number, has_failed in paths.items() if has_failed}
    return State([list(paths) for paths in groups], frozenset(failed), group)


def reinstate(name: str, paths: Iterable[str]) -> None:
    """Read by these again. Raises NotOurs, OSError."""
    for path in paths:
        devmapper.tell(name, f"reinstate_path {path}")


def fail(name: str, paths: Iterable[str]) -> None:
    """Do not read by these any more. Raises NotOurs, OSError."""
    for path in paths:
        devmapper.tell(name, f"fail_path {path}")


def switch_to(name: str, group: int) -> None:
    """Read by another group, counted from 1: a map stays with one until it fails. Raises NotOurs, OSError."""
    devmapper.tell(name, f"switch_group {group}")


def _paths(words: Iterator[str], count: int, details: int) -> Iterator[tuple[str, bool]]:
    """So many disks, and whether each has failed."""
    for _ in range(count):
        number, how, _times = islice(words, 3)
        _skip(words, details)
        yield number, how == "F"


def _skip(words: Iterator[str], count: int) -> None:
    for _ in islice(words, count):
        pass
