"""How a deployment is to travel: pure code, without a database.

In a pipelined tree ``fanout`` copies leave each host through its network card, and each hop adds the time of what is on
its way at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from volt.tree import depth


@dataclass(frozen=True)
class Method:
    """A way for whole images. ``together``: its hosts begin together, and each needs a driver (drivers/transfer).

    ``seeds``: who receives sends as well, and goes on with that until all hosts have all of it. ``encrypts``: nobody
    else can read it, if that is asked for.
    """

    name: str
    together: bool = False
    seeds: bool = False
    encrypts: bool = True


METHODS = {
    method.name: method
    for method in (
        Method("lazy"),
        Method("tree"),
        Method("unicast"),
        Method("bittorrent", together=True, seeds=True, encrypts=False),
        Method("udpcast", together=True, encrypts=False),
        Method("uftp", together=True),
    )
}

RATE = 110e6
"""Bytes a second of a network card of 1 Gbit/s, less what its protocols take."""

LONGEST_CHAIN = 64
"""Hosts. A read of a VM may pass all of them; and no parser reads the JSON of a tree of a hundred levels."""

HOP = 0.01
"""Seconds by which each hop of a tree is behind the one above."""


def chosen(method: str) -> str:
    """The method for ``auto``."""
    return "tree" if method == "auto" else method


def tree_seconds(size: int, hosts: int, fanout: int) -> float:
    """How long a pipelined tree of so many hosts takes for ``size`` bytes."""
    return fanout * size / RATE + depth(hosts, fanout) * HOP


def chain_is_faster(size: int, hosts: int, fanout: int) -> bool:
    """Whether a chain of hosts may be, and ends before a heap."""
    return hosts <= LONGEST_CHAIN and tree_seconds(size, hosts, 1) < tree_seconds(size, hosts, fanout)
