"""Which reads were a host's misses, and how long they took.

All VMs play the same reads in the same order. So a read can bring something new into a host's cache only if it touches
a cluster that no earlier read of the trace touches, and only for the VM of that host that asks for it first. It is
counted as a miss unless a host below, whose misses pass through this host's cache, asked for it even earlier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.figures import percentile
from benchmarks.nbdreplay import HostTimes


@dataclass(frozen=True)
class Place:
    """Where a host is in the tree: ``parent`` is the host that it reads from; ``depth`` 1 is next to the origin."""

    parent: str
    depth: int


def misses(
    hosts: Mapping[str, HostTimes], places: Mapping[str, Place], touches: Sequence[int]
) -> dict[str, list[float]]:
    """Per host the seconds that its misses took. ``touches``: see ``trace.first_touches``."""
    found: dict[str, list[float]] = {}
    below: dict[str, list[float]] = defaultdict(lambda: [float("inf")] * len(touches))
    for host in sorted(hosts, key=lambda name: places[name].depth, reverse=True):
        times = hosts[host]
        asked = [times.first_asked[index] for index in touches]
        found[host] = [
            times.first_waited[index]
            for index, here, under in zip(touches, asked, below[host], strict=True)
            if here < under
        ]
        parent = places[host].parent
        below[parent] = [min(three) for three in zip(asked, below[host], below[parent], strict=True)]
    return found


def by_depth(values: Mapping[str, Sequence[float]], places: Mapping[str, Place]) -> dict[int, dict[str, float]]:
    """Number, median and 99 % of the hosts' values, per depth."""
    grouped: dict[int, list[float]] = defaultdict(list)
    for host, of_host in values.items():
        grouped[places[host].depth] += of_host
    return {
        depth: {"n": len(of_depth), "p50": percentile(of_depth, 50), "p99": percentile(of_depth, 99)}
        for depth, of_depth in sorted(grouped.items())
        if of_depth
    }
