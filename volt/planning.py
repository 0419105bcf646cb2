"""How a deployment is to travel: pure code, without a database.

The constants were measured by ``python -m benchmarks.deploy``; docs/performance.md has the table. What they get wrong
in a cluster, the deployments that have ended there correct.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from volt.tree import depth

AUTO = "auto"
"""The method of a deployment whose hosts try the network, until it is known how the image is to travel."""


@dataclass(frozen=True)
class Method:
    """A way for whole images. ``together``: its hosts begin together, and each needs a driver (drivers/transfer).

    ``seeds``: who receives sends as well, and goes on with that until all hosts have all of it. ``encrypts``: nobody
    else can read it, if that is asked for. ``listens``: seconds in which receivers hear a sender before all begin.
    """

    name: str
    together: bool = False
    seeds: bool = False
    encrypts: bool = True
    listens: float = 0.0


METHODS = {
    method.name: method
    for method in (
        Method(AUTO, together=True, listens=2.0),
        Method("lazy"),
        Method("tree"),
        Method("unicast"),
        Method("bittorrent", together=True, seeds=True, encrypts=False),
        Method("udpcast", together=True, encrypts=False),
        Method("uftp", together=True),
    )
}

BY_TREE, MULTICAST = ("lazy", "tree"), ("udpcast", "uftp")

RATE = 110e6
"""Bytes a second of a network card of 1 Gbit/s, less what its protocols take."""

LONGEST_CHAIN = 64
"""Hosts. A read of a VM may pass all of them; and no parser reads the JSON of a tree of a hundred levels."""

LINK_PART = 0.95
"""Of a link's rate, for packets that wait for no answer: the rest is for their headers and repairs."""

HOP = 0.01
"""Seconds by which each hop of a tree is behind the one above."""

LAZIER = 1.2
"""How much longer a tree takes behind all else."""
TURN = 1.0
"""Seconds between the end of one host and the beginning of the next one, where hosts have turns."""

OLDEST = 200
"""Deployments that have ended which correct what is predicted, at most."""
FEWEST, MOST = 0.25, 4.0
"""How far that may correct it."""


def tree_seconds(size: int, hosts: int, fanout: int, rate: float = RATE) -> float:
    """How long a pipelined tree of so many hosts takes for ``size`` bytes.

    ``fanout`` copies leave each host through its network card, and each hop adds the time of what is on its way.
    """
    return fanout * size / rate + depth(hosts, fanout) * HOP


def chain_is_faster(size: int, hosts: int, fanout: int) -> bool:
    """Whether a chain of hosts may be, and ends before a heap."""
    return hosts <= LONGEST_CHAIN and tree_seconds(size, hosts, 1) < tree_seconds(size, hosts, fanout)


@dataclass(frozen=True)
class Facts:
    """What is known of a deployment before it travels.

    ``size``: bytes that some host lacks. ``hosts`` that receive. ``rate``: bytes a second that a host got from the tree
    while all tried, in the middle; ``link``: the most that any host got, lately. ``loss``: the part of multicast
    packets that did not come, in the middle; ``reached``: the part of the hosts that any reached. ``able``: the methods
    that most hosts have all for.
    """

    size: int
    hosts: int
    fanout: int
    rate: float
    link: float
    loss: float
    reached: float
    limit: int | None
    encrypt: bool
    able: frozenset[str]

    def __str__(self) -> str:
        """For people."""
        heard = f"multicast reaches {self.reached:.0%} of them and loses {self.loss:.1%}" if self.reached else ""
        limit = f"at most {self.limit / 1e6:.1f} MB/s a host" if self.limit else ""
        return ", ".join(
            part
            for part in (
                f"{self.size / 1e6:.0f} MB to {self.hosts} hosts",
                f"{self.rate / 1e6:.1f} MB/s by the tree",
                heard or "multicast reaches none of them",
                "encrypted" if self.encrypt else "not encrypted",
                limit,
            )
            if part
        )

    @property
    def pace(self) -> float:
        """Bytes a second at which a sender may multicast: nothing in its protocols finds out what a link can carry."""
        return min(LINK_PART * self.link, self.limit or self.link)

    @property
    def is_chain(self) -> bool:
        return chain_is_faster(self.size, self.hosts, self.fanout)


def predict(facts: Facts, factors: Mapping[str, float]) -> dict[str, float]:
    """The seconds that each method that can be used is expected to take. ``factors``: see ``corrections``."""
    return {
        name: round(_seconds(name, facts) * factors.get(name, 1.0), 3) for name in METHODS if _is_possible(name, facts)
    }


def _is_possible(name: str, facts: Facts) -> bool:
    method = METHODS[name]
    if name == AUTO or (facts.encrypt and not method.encrypts):
        return False
    if name in MULTICAST and facts.reached < 1:
        return False
    return name in facts.able or not method.together


def _seconds(name: str, facts: Facts) -> float:
    fanout = 1 if facts.is_chain else facts.fanout
    rate = min(facts.rate, facts.limit or facts.rate)
    if name == "tree":
        return tree_seconds(facts.size, facts.hosts, 1, rate)  # the rate is that of the tree as it is
    if name == "lazy":
        return LAZIER * facts.fanout / fanout * tree_seconds(facts.size, facts.hosts, 1, rate)
    if name == "unicast":
        return facts.hosts * (facts.size / rate + TURN)
    start, slower = TOGETHER[name]
    repairs = 1 + REPAIRS * facts.loss if name in MULTICAST else 1.0
    return start + slower * repairs * facts.size / facts.pace


TOGETHER = {"bittorrent": (4.0, 1.3), "udpcast": (2.5, 1.1), "uftp": (3.5, 1.3)}
"""Seconds until a method moves anything, and how much longer it takes than the image through one link."""
REPAIRS = 4.0
"""How much more a multicast sends for each packet that is lost at one receiver: others lose other packets."""


def corrections(ended: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """By method, how much longer it takes than predicted: of what has ended, its method, predicted and real seconds."""
    ratios: dict[str, list[float]] = {}
    for method, predicted, seconds in ended:
        if predicted > 0:
            ratios.setdefault(method, []).append(seconds / predicted)
    return {method: min(max(median(found), FEWEST), MOST) for method, found in ratios.items()}
