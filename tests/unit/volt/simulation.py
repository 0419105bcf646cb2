"""Hosts around a tree, as unhelpful as the protocol allows: late, stale, evicted without knowing, and back again.

The tree may be set back to an old copy while the hosts keep what they have.

The edges that may carry data are tracked apart from what Volt believes, and have to be free of loops at all times.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

from volt.tree import Node, Tree, depth, rank

Lists = dict[str, tuple[tuple[str, ...], frozenset[str]]]
ROUNDS = 100
"""Settling takes a few."""


@dataclass
class Agent:
    """A host. ``using``: lists by revision that it may read by. ``newest``: the highest revision that it has seen."""

    using: dict[int, tuple[str, ...]] = field(default_factory=dict)
    newest: int = 0

    def receive(self, revision: int, parents: tuple[str, ...]) -> None:
        """Begin to read by a list while still reading by the ones before; never go back."""
        if revision > self.newest:
            self.newest = revision
            self.using[revision] = parents

    def apply(self) -> None:
        """Stop reading by all lists but the newest."""
        self.using = {self.newest: self.using[self.newest]} if self.newest in self.using else {}


class Cluster:
    """A tree and its hosts. Messages stay on their way until they are delivered, in any order."""

    def __init__(self, fanout: int, places: Sequence[str] = ("",)) -> None:
        """One image with one origin. The hosts are in these places by turns, the origin in the first one."""
        self.places = places
        self.tree = Tree(fanout, home=places[0])
        self.agents: dict[str, Agent] = {}
        self.answers: list[tuple[str, int, tuple[str, ...]]] = []
        self.confirmations: list[tuple[str, int]] = []
        self.publish("origin")
        self.backup = deepcopy(self.tree)

    @classmethod
    def grown(cls, hosts: int, fanout: int, places: Sequence[str] = ("",)) -> Cluster:
        """One with hosts h1, h2, … that joined in this order, everybody settled."""
        cluster = cls(fanout, places)
        for number in range(1, hosts + 1):
            cluster.join(f"h{number}")
        cluster.settle()
        return cluster

    def agent(self, host: str) -> Agent:
        """The agent of a host."""
        return self.agents.setdefault(host, Agent())

    @property
    def members(self) -> list[str]:
        """Hosts in the tree besides the origins."""
        return [self.tree.slots[spot].host for spot in sorted(node.spot for node in self.tree.members)]

    @property
    def gone(self) -> list[str]:
        """Hosts that have no place now."""
        return [host for host in self.agents if host not in self.tree.hosts]

    def place(self, host: str) -> str:
        """Where a host is."""
        return self.places[int(host.removeprefix("h")) % len(self.places) if host != "origin" else 0]

    def publish(self, host: str) -> None:
        """A host that has the whole image serves it; it reads from nobody and heeds no older list."""
        self.tree.publish(host, self.place(host))
        self.agents[host] = Agent(newest=self.tree.tell(host).revision)

    def leave(self, host: str) -> None:
        """A host has dropped all parents, heeds no older list, and says so."""
        agent = self.agent(host)
        dropped = agent.newest
        agent.using, agent.newest = {}, self.tree.revision
        self.tree.leave(host, dropped)

    def ask(self, host: str) -> None:
        """Volt answers a heartbeat or a join; the answer is on its way."""
        node = self.tree.tell(host)
        self.answers.append((host, node.revision, self.tree.parents(node)))

    def join(self, host: str) -> None:
        """Volt gives the host a place; the answer is on its way."""
        if host not in self.tree.hosts and self.agent(host).using:
            self.tree.note_orphan(host, self.agent(host).newest)
        self.tree.join(host, self.place(host))
        self.ask(host)

    def deliver_answer(self, which: int) -> None:
        """A host gets an answer, perhaps an old one."""
        host, revision, parents = self.answers.pop(which % len(self.answers))
        self.agent(host).receive(revision, parents)

    def send_confirmation(self, host: str) -> None:
        """A host reads only by its newest list, and says so; the message is on its way."""
        self.agent(host).apply()
        self.confirmations.append((host, self.agent(host).newest))

    def deliver_confirmation(self, which: int) -> None:
        """Volt hears it, perhaps late."""
        host, revision = self.confirmations.pop(which % len(self.confirmations))
        if host in self.tree.hosts:
            self.tree.confirm(host, revision)

    def speak(self, host: str) -> None:
        """A host that reads only by its newest list says so, and Volt hears it at once."""
        self.agent(host).apply()
        self.tree.hear(host, self.agent(host).newest)

    def obey(self, *hosts: str) -> None:
        """Hosts hear the newest and confirm it at once; no message stays on its way."""
        for host in hosts:
            node = self.tree.tell(host)
            self.agent(host).receive(node.revision, self.tree.parents(node))
            self.speak(host)

    def settle(self, but: Collection[str] = ()) -> None:
        """Everybody hears and confirms everything, except for some that hear nothing."""
        self.answers.clear()
        self.confirmations.clear()
        waiting = [host for host in self.tree.hosts if host not in but]
        for _ in range(ROUNDS):
            self.obey(*waiting)
            waiting = [node.host for node in self.tree.hosts.values() if not node.settled and node.host not in but]
            if not waiting:
                return
        raise AssertionError(f"{waiting} do not settle")

    def back_up(self) -> None:
        """Keep a copy of what Volt has stored."""
        self.backup = deepcopy(self.tree)

    def set_back(self, first: int) -> None:
        """Volt's store is set back to the copy; connections end. One host with a lost list speaks before all others.

        Before it an origin's address changes, which gives revisions but no list: so what is lost is not greater than
        all that is given now.
        """
        lost, self.tree = self.tree, deepcopy(self.backup)
        self.tree.floor = max(lost.revision, *(agent.newest for agent in self.agents.values())) + 1
        self.answers.clear()
        self.confirmations.clear()
        for agent in self.agents.values():
            if not agent.using:  # it has no record of the image
                agent.newest = 0
        before = self.tree.revision
        self.tree.readdress(self.tree.origins[0].host)
        if foreign := [host for host, agent in self.agents.items() if agent.using and agent.newest > before]:
            self.speak(foreign[first % len(foreign)])

    def lists(self) -> Lists:
        """Each host's parents and children."""
        tree = self.tree
        return {host: (tree.parents(node), frozenset(tree.children(node))) for host, node in tree.hosts.items()}

    def check(self) -> None:
        """What is true at all times."""
        tree = self.tree
        TopologicalSorter(
            {host: {p for parents in agent.using.values() for p in parents} for host, agent in self.agents.items()}
        ).prepare()  # raises CycleError
        heaps = [(place, slot) for place in {*self.places} for slot in range(1, tree.last(place) + 1)]
        assert {*tree.slots} == {*heaps, *(("", -number) for number in range(len(tree.origins)))}
        for node in tree.hosts.values():
            self._check_node(node)

    def _check_node(self, node: Node) -> None:
        tree = self.tree
        parents = [tree.hosts[host] for host in tree.parents(node)]
        assert all(self._position(parent) < self._position(node) for parent in parents)
        assert len(set(parents)) == len(parents)
        assert bool(parents) == (node.slot > 0)
        assert set(tree.children(node)) == {other for other in tree.hosts if node.host in self._parents_of(other)}
        last = tree.last(node.place)
        assert depth(node.slot, tree.fanout) <= heap_height(last, tree.fanout)
        assert node.confirmed <= node.told <= tree.revision >= node.revision >= node.awaited

    def first_parent(self, node: Node) -> str:
        """The host that a node reads from if all are offered: in its heap, else in the place before, or an origin."""
        tree, home = self.tree, self.tree.home
        above = (node.slot - 1) // tree.fanout if node.place == home else (node.slot - 2) // tree.fanout + 1
        if node.place == home or node.slot > 1:
            return (tree.slots[node.place, above] if above > 0 else tree.origins[0]).host
        own = [origin.host for origin in tree.origins if origin.place == node.place]
        inhabited = {other.place for other in tree.members}
        before = sorted((place for place in inhabited if self._rank(place) < self._rank(node.place)), key=self._rank)
        exits = (tree.slots[place, tree.last(place) if tree.fanout == 1 else 1].host for place in reversed(before))
        return [*own, *exits, tree.origins[0].host][0]

    def _rank(self, place: str) -> tuple[object, ...]:
        return (place != self.tree.home, *rank(self.tree.home, place))

    def _position(self, node: Node) -> tuple[object, ...]:
        """What is greater for a reader than for what it reads from."""
        if node.slot <= 0:
            return (-1, node.slot)
        return (*self._rank(node.place), node.slot)

    def _parents_of(self, host: str) -> tuple[str, ...]:
        return self.tree.parents(self.tree.hosts[host])


def heap_height(last: int, fanout: int) -> int:
    """Levels below the root of a complete heap whose last slot is this, counted level by level."""
    height, size, level = 0, 1, 1
    while size <= last:
        level *= fanout
        size += level
        height += 1
    return height
