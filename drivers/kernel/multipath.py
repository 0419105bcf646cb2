"""The paths of multipath maps: which have failed, and having a map read by them again, or not.

A path that failed stays in its map, which does not read by it until it is told to. That takes no time, where another
table waits for all reads that are on their way below the map.

Linux: drivers/md/dm-mpath.c. All of it is done at once: no process is needed (drivers/kernel/dmioctl.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from drivers.kernel import devmapper, dmioctl

HOLDS, FAILS = "queue_if_no_path", "fail_if_no_path"
"""What a map does with requests that it has no path for."""

_FAILED = re.compile(r"(\d+:\d+) F \d+")
_GROUP_READ = re.compile(r" multipath 2 \d+ \d+ 0 \d+ (\d+) ")
"""A map's status: its queue, its groups, and that which it reads by (multipath_status)."""
_GROUP = re.compile(r"(?<= )[a-z-]+ 0 \d+ \d+(?= \d+:\d+)")
"""What a group of paths begins with in a table: how one is chosen, and how many there are."""

Groups = Sequence[Sequence[str]]
"""Disks by their numbers, ``major:minor``. A map reads by those of a group while it can, and by the next one's then."""


@dataclass(frozen=True)
class State:
    """How a map reads: not by the paths that have failed, and by this one of its groups, counted from 1."""

    failed: frozenset[str]
    group: int


def state(name: str) -> State:
    """Of one map. Raises OSError."""
    told = dmioctl.status(name)
    found = _GROUP_READ.search(told)
    return State(frozenset(_FAILED.findall(told)), int(found[1]) if found else 0)


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


def groups_in(table: str) -> list[list[str]]:
    """The groups of a map, by its table."""
    return [devmapper.numbers_in(part) for part in _GROUP.split(table)[1:]]


def good_of(groups: Groups, failed: Collection[str]) -> list[list[str]]:
    """The groups without those that have failed; one of which none is left is not there."""
    left = ([number for number in group if number not in failed] for group in groups)
    return [group for group in left if group]


def first_good(groups: Groups, failed: Collection[str]) -> int:
    """The first group that has a path which has not failed, counted from 1; 0 if none has."""
    return next((place for place, group in enumerate(groups, 1) if not set(group) <= set(failed)), 0)
