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
TRIES = 2.0
"""Seconds for that."""


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
        Method(AUTO, together=True),
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

SLOWEST = 1.0
"""Bytes a second of what has brought nothing yet."""

LONGEST_CHAIN = 64
"""Hosts. A read of a VM may pass all of them; and no parser reads the JSON of a tree of a hundred levels."""

LINK_PART = 0.95
"""Of a link's rate, for packets that wait for no answer: the rest is for their headers and repairs."""

HOP = 0.01
"""Seconds by which each hop of a tree of such cards is behind the one above."""

LAZIER = 1.2
"""How much longer a tree takes behind all else."""
TURN = 1.0
"""Seconds between the end of one host and the beginning of the next one, where hosts have turns."""
END = 1.0
"""Seconds until Volt has heard that a host has all of the image."""

OLDEST = 200
"""Deployments that have ended which correct what is predicted, at most."""
FEWEST, MOST = 0.25, 4.0
"""How far that may correct it."""


def tree_seconds(size: int, hosts: int, fanout: int) -> float:
    """How long a pipelined tree of so many hosts takes for ``size`` bytes.

    ``fanout`` copies leave each host through its network card, and each hop adds the time of what is on its way.
    """
    return fanout * size / RATE + depth(hosts, fanout) * HOP


def chain_is_faster(size: int, hosts: int, fanout: int) -> bool:
    """Whether a chain of hosts may be, and ends before a heap."""
    return hosts <= LONGEST_CHAIN and tree_seconds(size, hosts, 1) < tree_seconds(size, hosts, fanout)


@dataclass(frozen=True)
class Facts:
    """What is known of a deployment whose hosts have tried the network.

    ``size``: bytes that some host lacked. ``hosts`` that receive. ``shape``: the fanout of the tree meanwhile;
    ``fanout``: that of the usual one. ``rate``: bytes a second that the tree brings; ``hop``: seconds that each hop of
    it adds. ``link``: bytes a second that a link can carry. ``loss``: the part of multicast packets that did not come,
    in the middle; ``reached``: the part of the hosts that any reached. ``able``: the methods that most hosts have all
    for. ``taken``: seconds since the deployment was asked for; ``tried``: since the tree has begun.
    """

    size: int
    hosts: int
    fanout: int
    shape: int
    rate: float
    hop: float
    link: float
    loss: float
    reached: float
    limit: int | None
    encrypt: bool
    able: frozenset[str]
    taken: float
    tried: float

    def __str__(self) -> str:
        """For people."""
        heard = f"multicast reaches {self.reached:.0%} of them and loses {self.loss:.1%}" if self.reached else ""
        limit = f"at most {self.limit / 1e6:.1f} MB/s a host" if self.limit else ""
        return ", ".join(
            part
            for part in (
                f"{self.size / 1e6:.0f} MB to {self.hosts} hosts",
                f"{self.rate / 1e6:.1f} MB/s by the tree",
                f"links of {self.link / 1e6:.1f} MB/s",
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
    def delay(self) -> float:
        """Seconds until the tree brings anything to the last host."""
        return depth(self.hosts, self.shape) * self.hop

    @property
    def left(self) -> float:
        """Bytes that the last host lacks now."""
        return max(0.0, self.size - self.rate * max(0.0, self.tried - self.delay))


def predict(facts: Facts) -> dict[str, float]:
    """The seconds that a deployment is expected to take by each method that can be used, the try included."""
    return {name: _seconds(name, facts) + END for name in METHODS if _is_possible(name, facts)}


def _is_possible(name: str, facts: Facts) -> bool:
    method = METHODS[name]
    if name == AUTO or (facts.encrypt and not method.encrypts):
        return False
    if name in MULTICAST and facts.reached < 1:
        return False
    return name in facts.able or not method.together


def _seconds(name: str, facts: Facts) -> float:
    rate = min(facts.rate, facts.limit or facts.rate)
    if name in BY_TREE:
        slower = 1.0 if name == "tree" else LAZIER * facts.fanout / facts.shape
        return facts.taken - facts.tried + facts.delay + slower * facts.size / rate
    if name == "unicast":
        return facts.taken + facts.hosts * (facts.left / rate + TURN)
    start, slower = TOGETHER[name]
    pace = facts.pace / slower
    pace = pace / (1 + REPAIRS * facts.loss) if name in MULTICAST else min(pace, SWARM * rate)
    return facts.taken + start + facts.left / pace


TOGETHER = {"bittorrent": (2.0, 1.16), "udpcast": (3.0, 1.05), "uftp": (2.0, 1.1)}
"""Seconds until a method moves anything, and how much longer it takes than the image through one link."""
REPAIRS = 10.0
"""How much longer a multicast takes for each packet that is lost at one receiver: others lose other packets."""
SWARM = 1.1
"""How much faster than a tree BitTorrent may be where TCP is slower than links are."""


def corrected(predicted: Mapping[str, float], ended: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """What ``predict`` says, times how much longer it has taken. ``ended``: methods, what was predicted, real seconds.

    That is not corrected yet: else each correction would count as an error of the next one. All ways through the tree
    have one correction: else what nobody has tried yet seems to be faster than what is known to be slower.
    """
    ratios: dict[str, list[float]] = {}
    for method, expected, seconds in ended:
        if expected > 0:
            ratios.setdefault(_way(method), []).append(seconds / expected)
    factors = {way: min(max(median(found), FEWEST), MOST) for way, found in ratios.items()}
    return {method: seconds * factors.get(_way(method), 1.0) for method, seconds in predicted.items()}


def _way(method: str) -> str:
    return method if method in METHODS and METHODS[method].together else "tree"
