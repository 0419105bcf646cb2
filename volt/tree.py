"""An image's attach tree: who may read from whom, and why that never makes a loop.

Slots 1, 2, … are a complete k-ary heap below slot 0; the heap parent of slot i is (i - 1) // k. Origins, which hold
the whole image and read from nobody, are in slots 0, -1, -2, …; together they play the part of slot 0. A host reads
from its heap parent, else from the heap parent's siblings, else from its grandparent, else from an origin: always
from a smaller slot.

Hosts have a *place*, a site and a rack, and each place has a heap of its own. The heap of the *home* place, that of
the first origin, hangs below the origins. Every other heap has its root in slot 1: the *gate* of the place. Only gates
read from other places, so an image comes to each place once. The places are a chain in a fixed order: home, the other
racks of its site, the other sites one after the other. A gate reads from an origin in its own place, else from the gate
before it, else from the one before that. So the uplink of a rack carries an image once each way, and so does that of a
site. Where heaps are chains, gates read from the ends of those chains instead, so that no host has two children: the
*exit* of a place is its gate, or the end of its chain. What is said below of smaller and larger slots holds for the
places in their order, and for the slots of a place.

A host learns of a change late, and it may go on for long with an old list of parents. So the edges that may carry
data are more than those of the current lists: a host may use any list that it was given since the one it last
confirmed. It promises to follow the newest list that it has seen, never to go back, and to confirm a list only when
it reads from the parents of no older one. A host that has dropped all parents says so when it leaves. Nothing is
promised about other hosts that left or were evicted: those keep all edges they had.

Call what a host can reach over edges that may carry data its *reach*. A node is *offered* as a parent only while its
reach holds no node with a slot above its own, returning ones aside. Then no loop can come to be: an edge is added only
from a node to an offered node with a smaller slot, whose reach does not hold the former. These rules keep it so:

- *Join* takes a new last slot: nobody reads from the new node, and everything it may read from is in smaller slots.
- *Move.* When a node leaves, the node in the last slot of its place takes its slot. No offered node reaches the moved
  one, for that would have to be in a slot above the last; and the moved one is not offered (``moving``) until it
  confirmed that it reads only from its new parents. All other slots stay, and slots only ever become smaller. (Gates
  that read from the moved one are in later places, whatever its slot.)
- *Places* have their order by their names, so it never changes. A host gets another place only by leaving the tree.
- *Return.* A host that left and joins again gets a larger slot, while nodes that were never told may still read from
  it. Until all those have confirmed a later list it is ``returning``: it gets only origins as parents, which read
  from nobody, and it is not offered. Who may still read from it: nodes in the tree that have something to confirm and
  confirmed nothing since it left; and hosts that left after it, in the same condition, as long as somebody may still
  read from these in turn. If there is nobody, and the host itself had dropped all parents, it is new again.
- *Origins* never read, so any order among them is safe. A host that publishes must not read from the tree any more.

A store that was set back to an old copy ends what was known: hosts read by lists of a history that the store has lost.
This tree has not given those lists and must not believe in them. So:

- *Numbers.* A revision is at least ``floor``, a number that grows with time. What is given after the store was set back
  has a greater revision than anything that was given before: hosts follow it, and no number is given twice.
- *Word.* A host is believed only when it names the very revision that it was told last (``told``). A smaller one came
  late, or was lost: it says nothing, and the host is told a newer one now.
- *Alarm.* A host in the tree names a greater revision than it was told, or one outside names one that it was not given
  before it left: the store was set back (or is new: that is the oldest copy of all). From then on all nodes are
  ``moving`` and may read by any list, and so may all hosts that are known to have left. The argument begins anew: only
  origins are offered; a node is offered when it confirmed a list from after the alarm, and all that it reaches by that
  have done so before it.
- *Orphans.* A host that has a list and no place here says so before it asks for one. An agent does: it learns that it
  has no place from the answer to its heartbeat. If this tree has not given the list, the host counts as one that left
  now. A list from before the last alarm (``begun``) is no reason for another alarm.

Until the first host speaks that has such a list, nobody can know of it: what is added meanwhile may make a loop with
what was lost. It ends when the hosts follow what they are told after the alarm.

Whether a host lives has no part in this. A node that is reported dead is not offered (``suspect``) until it confirms
an assignment made after the report. Origins are always offered as the last resort, in whatever state: a list is never
empty.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from operator import attrgetter

from volt.models import NodeState

OFFERED = frozenset({NodeState.JOINING, NodeState.READY})

FAR = 2**42
"""No revision is this far above those that are given now, be the store set back. In milliseconds these are 139 years:
more than passed since 1970, which is where a clock may stand that was never set.
"""


Spot = tuple[str, int]
"""A place and a slot; for an origin no place."""


@dataclass(eq=False)
class Node:
    """A host's place in one tree. ``slot``: of the heap of its ``place``; those of origins are of the whole tree.

    ``revision``: of its newest assignment. ``awaited``: the revision that it has to confirm to be settled, that is, of
    its newest list of parents. ``confirmed``: the newest one that it confirmed. ``told``: the newest one that it was
    told. ``returned``: the revision at which the host left the tree before, while somebody may still read from it by a
    list from before that. ``whole``: the host has all of the image, and is preferred to other parents.
    """

    host: str
    slot: int
    state: NodeState
    revision: int
    awaited: int
    confirmed: int
    told: int
    returned: int | None = None
    fetched_bytes: int = 0
    sent_bytes: int = 0
    parent: str | None = None
    whole: bool = False
    place: str = ""

    @property
    def spot(self) -> Spot:
        """What no other node of the tree has."""
        return (self.place if self.slot > 0 else "", self.slot)

    @property
    def settled(self) -> bool:
        """Whether the host is known to use its newest list of parents and no other."""
        return self.confirmed >= self.awaited


@dataclass(eq=False)
class Departure:
    """A host left the tree at ``revision``, having confirmed every list older than ``confirmed``.

    ``dropped``: it reads by no list at all. ``awaited``: it may have VMs that need the image, so a withdrawn image
    waits for the host. This has no part in the tree's rules.
    """

    host: str
    revision: int
    confirmed: int
    dropped: bool
    awaited: bool = False


def depth(slot: int, fanout: int) -> int:
    """How many hops a slot is below the origin."""
    hops = 0
    while slot > 0:
        slot = (slot - 1) // fanout
        hops += 1
    return hops


def heap_children(slot: int, fanout: int) -> range:
    """The slots whose heap parent this is."""
    return range(slot * fanout + 1, slot * fanout + fanout + 1)


def siblings(slot: int, fanout: int) -> list[int]:
    """The other slots with the same heap parent, in a ring from the next one, so that their load is spread."""
    family = heap_children((slot - 1) // fanout, fanout)
    place = slot - family.start
    return [*family[place + 1 :], *family[:place]]


def sources(slot: int, fanout: int, root: int = 0) -> list[int]:
    """The slots above 0 that a slot may read from, in order: heap parent, its siblings, grandparent.

    ``root``: the slot of the heap's root.
    """
    if slot <= root:
        return []
    parent = (slot - root - 1) // fanout
    above = [parent, *siblings(parent, fanout), (parent - 1) // fanout] if parent > 0 else [parent]
    return [index + root for index in above if index + root > 0]


def readers(slot: int, fanout: int, root: int = 0) -> list[int]:
    """The slots that have this one among their ``sources``."""
    index = slot - root
    children = heap_children(index, fanout)
    nieces = [niece for sibling in siblings(index, fanout) for niece in heap_children(sibling, fanout)] if index else []
    grandchildren = [grandchild for child in children for grandchild in heap_children(child, fanout)]
    return [reader + root for reader in (*children, *nieces, *grandchildren)]


def rank(home: str, place: str) -> tuple[object, ...]:
    """Where a place comes in the chain of places that begins with ``home``: by site and rack, and round."""
    (first, _, beginning), (site, _, rack) = home.partition("/"), place.partition("/")
    return (site < first, site, site == first and rack < beginning, rack)


def deepest(last: Mapping[str, int], fanout: int, home: str) -> int:
    """How many hops the deepest host is below the origins, at most. ``last``: by place, the last slot in use."""
    above = int(last.get(home, 0) > 0)
    found = depth(last.get(home, 0), fanout)
    for place in sorted((place for place, slot in last.items() if slot > 0 and place != home), key=partial(rank, home)):
        above = (found if fanout == 1 else above) + 1
        found = max(found, above + depth(last[place] - 1, fanout))
    return found


class Places:
    """Which host has which slot of which place, and so who may read from whom."""

    def __init__(self, fanout: int, nodes: Iterable[Node], home: str) -> None:
        self.fanout, self.home = fanout, home
        self._rank = partial(rank, home)
        self.hosts = {node.host: node for node in nodes}
        self.slots = {node.spot: node for node in self.hosts.values()}
        self._last = Counter(node.place for node in self.members)
        self._chain = sorted(self._last.keys() - {home}, key=self._rank)
        """The places with a gate."""

    @property
    def origins(self) -> list[Node]:
        """The origins, the one in slot 0 first."""
        found: list[Node] = []
        while (node := self.slots.get(("", -len(found)))) is not None:  # their slots have no gap
            found.append(node)
        return found

    @property
    def members(self) -> list[Node]:
        """All nodes but the origins."""
        return [node for node in self.slots.values() if node.slot > 0]

    def last(self, place: str) -> int:
        """The last slot of a place in use."""
        return self._last[place]

    def below(self, node: Node) -> list[Node]:
        """The nodes that read from a node first, whatever the states of all."""
        place, root = (node.place, self._root(node.place)) if node.slot > 0 else (self.home, 0)
        slots = heap_children(node.slot - root, self.fanout) if node.slot >= 0 else ()
        found = [self.slots[place, slot + root] for slot in slots if (place, slot + root) in self.slots]
        gates = (
            [self.slots[place, 1] for place in self._chain]
            if node.slot <= 0 or node.spot == self._exit(node.place)
            else []
        )
        return found + [gate for gate in gates if (self._sources(gate) or self.origins)[0] is node]

    def parents(self, node: Node) -> tuple[str, ...]:
        """The hosts that a node is to read from, in order of preference."""
        if node.slot <= 0:
            return ()
        peers = [] if node.returned is not None else self._sources(node)
        offered = [peer for peer in peers if peer.state in OFFERED]
        if self.fanout > 1:  # a chain would fork
            offered.sort(key=lambda peer: peer.slot > 0 and not peer.whole)
        origins = self.origins
        if not peers:
            # Only nodes without other parents are told which origins live: the death of an origin disturbs few.
            origins.sort(key=lambda origin: origin.state not in OFFERED)
        return tuple(dict.fromkeys(parent.host for parent in (*offered, *origins)))

    def children(self, node: Node) -> list[str]:
        """The hosts that have a node among their parents."""
        if node.slot <= 0:
            return [self.slots[spot].host for spot in sorted(self._all_spots())]
        below = (self.slots[spot] for spot in self._readers(node) if spot in self.slots)
        return [reader.host for reader in below if node.host in self.parents(reader)]

    def _root(self, place: str) -> int:
        return 0 if place == self.home else 1

    def _exit(self, place: str) -> Spot:
        """What gates of other places read from in a place."""
        return (place, self.last(place) if self.fanout == 1 else 1)

    def _index(self, place: str) -> int:
        """Where a place is in the chain, or would be."""
        return bisect_left(self._chain, self._rank(place), key=self._rank)

    def _sources(self, node: Node) -> list[Node]:
        """What a node may read from before all origins, in order, whatever the states."""
        root = self._root(node.place)
        if node.slot != root:
            return [self.slots[node.place, slot] for slot in sources(node.slot, self.fanout, root)]
        own = [origin for origin in self.origins if origin.place == node.place]
        where = self._index(node.place)
        before = [self.home, *self._chain][: where + 1][:-3:-1]
        return own + [self.slots[spot] for spot in map(self._exit, before) if spot in self.slots]

    def _readers(self, node: Node) -> list[Spot]:
        """The spots of what may have a node that is no origin among its ``_sources``."""
        local = [(node.place, slot) for slot in readers(node.slot, self.fanout, self._root(node.place))]
        return local + (self._gates_after(node.place) if node.spot == self._exit(node.place) else [])

    def _gates_after(self, place: str) -> list[Spot]:
        """The spots of the gates that may read from a place."""
        after = 0 if place == self.home else self._index(place)
        following = [other for other in self._chain[after : after + 3] if other != place]
        return [(other, 1) for other in following[:2]]

    def _put(self, node: Node, slot: int) -> None:
        """Give a node a slot, which is free."""
        if self.slots.get(node.spot) is node:
            self._take(node)
        node.slot = slot
        self.slots[node.spot] = self.hosts[node.host] = node
        if slot > 0:
            self._last[node.place] += 1
            if self._last[node.place] == 1 and node.place != self.home:
                insort(self._chain, node.place, key=self._rank)

    def _take(self, node: Node) -> None:
        """Take a node out of its slot."""
        del self.slots[node.spot]
        if node.slot > 0:
            self._last[node.place] -= 1
            if not self._last[node.place] and node.place != self.home:
                self._chain.remove(node.place)

    def _all_spots(self) -> Iterable[Spot]:
        return [node.spot for node in self.members]

    def _affected(self, node: Node) -> list[Spot]:
        """The spots of nodes whose lists may depend on a node's state."""
        if node.slot > 0:
            return self._readers(node)
        returning = [other.spot for other in self.hosts.values() if other.returned is not None]
        tops = [(self.home, slot) for slot in heap_children(0, self.fanout)]
        return [*tops, *((place, 1) for place in self._chain), *returning]

    def _lists(self, spots: set[Spot]) -> dict[str, tuple[str, ...]]:
        return {self.slots[spot].host: self.parents(self.slots[spot]) for spot in spots if spot in self.slots}


class Tree(Places):
    """One image's tree. Each change raises ``revision`` and stamps the nodes whose parents or children changed."""

    def __init__(
        self,
        fanout: int,
        revision: int = 0,
        nodes: Iterable[Node] = (),
        departures: Iterable[Departure] = (),
        begun: int = 0,
        floor: int = 0,
        home: str = "",
    ) -> None:
        """Take over what is stored: the tree changes these nodes and departures in place.

        ``begun``: the revision of the last alarm. ``floor``: all later revisions are at least this. It has to grow with
        time. ``home``: the place of the image's first origin; it never changes.
        """
        super().__init__(fanout, nodes, home)
        self.revision = revision
        self.begun = begun
        self.floor = floor
        self.departures = {departure.host: departure for departure in departures}

    def publish(self, host: str, place: str = "") -> Node:
        """Add an origin. It must not be in the tree."""
        self.departures.pop(host, None)
        node = Node(host, -len(self.origins), NodeState.JOINING, 0, 0, self.revision, self.revision, place=place)
        with self._change(self._all_spots(), node):
            self._put(node, node.slot)
        return node

    def join(self, host: str, place: str = "") -> Node:
        """The host's node; a new one if it has none. A node stays in the place where it joined.

        A join that is repeated gets a new revision: to have dropped earlier lists says nothing of a later join's.
        """
        if host in self.hosts:
            with self._change((), self.hosts[host]):
                return self.hosts[host]
        left = self.departures.pop(host, None)
        slot = self.last(place) + 1
        node = Node(host, slot, NodeState.JOINING, 0, 0, self.revision, self.revision, place=place)
        if left and not (left.dropped and not _followed(host, left.revision, self._in_use())):
            node.state, node.returned = NodeState.RETURNING, left.revision
            node.confirmed = self.revision if left.dropped else 0
        with self._change([node.spot, *(self._gates_after(place) if slot == 1 or self.fanout == 1 else ())]):
            self._put(node, slot)
        self._release()
        return node

    def leave(self, host: str, dropped: int = -1) -> bool:
        """Take a host out; the node in the last slot of its place takes its slot. Returns whether another node moved.

        ``dropped``: the host reads by no list of this revision or older ones; it may by those that it was given later.
        """
        node = self.hosts[host]
        is_origin = node.slot <= 0
        mover = self.origins[-1] if is_origin else self.slots[node.place, self.last(node.place)]
        reads_anew = mover is not node and not is_origin
        readers = [] if is_origin else self._readers(node) + self._readers(mover)
        changed = self._all_spots() if is_origin else [node.spot, mover.spot, *readers]
        with self._change(changed, *([mover] if reads_anew else [])):
            self._remove(node)
            if mover is not node:
                self._put(mover, node.slot)
            if reads_anew and mover.state in OFFERED:
                mover.state = NodeState.MOVING
        self.departures[host].dropped = dropped >= node.awaited
        self._release()
        return mover is not node

    def tell(self, host: str) -> Node:
        """The node of a host that is told its assignment now: from now on it may confirm this revision and no other."""
        node = self.hosts[host]
        node.told = node.revision
        return node

    def credible(self, revision: int) -> bool:
        """Whether this revision may ever have been given, if only in a history that the store has lost."""
        return revision <= max(self.revision, self.floor) + FAR

    def hear(self, host: str, revision: int) -> bool:
        """A host says that it follows this revision of an assignment: ``confirm`` or ``note_orphan``."""
        return self.confirm(host, revision) if host in self.hosts else self.note_orphan(host, revision)

    def confirm(self, host: str, revision: int) -> bool:
        """A host says that it reads only from parents of this revision or newer ones. That counts if it was told so.

        Returns False if the host cannot have been told this revision: the store was set back, and the tree gives the
        alarm.
        """
        node = self.hosts[host]
        if revision > node.told:
            self._begin_anew(revision)
            return False
        if revision == node.told:
            node.confirmed = revision
            if node.settled and node.state not in (NodeState.READY, NodeState.RETURNING):
                with self._change(self._affected(node)):
                    node.state = NodeState.READY if node.returned is None else NodeState.RETURNING
            self._release()
        return True

    def note_orphan(self, host: str, revision: int) -> bool:
        """A host without a place says that it has an assignment of this revision.

        Returns False if the host was not given this revision before it left: the store was set back, and the tree gives
        the alarm.
        """
        left = self.departures.get(host)
        if revision <= (left.revision if left else 0):
            return True
        known = revision <= self.begun
        if not known:
            self._begin_anew(revision)
        awaited = left is not None and left.awaited
        self.departures[host] = Departure(host, self.revision, 0, dropped=False, awaited=awaited)
        return known

    def suspect(self, reporter: str, dead: str) -> None:
        """A child reports that its parent is dead. Nothing happens if the child has other parents by now."""
        node = self.hosts.get(dead)
        if (
            node
            and node.state not in (NodeState.SUSPECT, NodeState.LOST)
            and dead in self.parents(self.hosts[reporter])
        ):
            self._doubt(node, NodeState.SUSPECT)

    def note_whole(self, host: str, *, whole: bool) -> None:
        """A host has all of the image from now on, or no longer. Only the order of others' parents depends on that."""
        node = self.hosts[host]
        if node.whole != whole:
            with self._change(self._affected(node)):
                node.whole = whole

    def reshape(self, fanout: int) -> None:
        """Have heaps of another fanout. All slots stay, so each host still reads from smaller ones only."""
        if fanout != self.fanout:
            with self._change(self._all_spots()):
                self.fanout = fanout

    def note_place(self, origin: str, place: str) -> None:
        """An origin is in another place now. The gate there prefers the origin."""
        node = self.hosts[origin]
        with self._change([(node.place, 1), (place, 1)]):
            node.place = place

    def lose(self, origin: str) -> None:
        """The lease of an origin ran out."""
        self._doubt(self.hosts[origin], NodeState.LOST)

    def readdress(self, host: str) -> None:
        """A host's address changed: its children have to learn the new one."""
        self.revision = self._next
        for child in self.children(self.hosts[host]):
            self.hosts[child].revision = self.revision

    @property
    def _next(self) -> int:
        """The revision of the next change."""
        return max(self.revision + 1, self.floor)

    def _begin_anew(self, revision: int) -> None:
        """Give the alarm: a host has a list of this revision that the store has lost, and so may all others."""
        self.revision = max(self.revision, revision)
        with self._change(self._all_spots(), *self.hosts.values()):
            for node in self.hosts.values():
                node.confirmed = 0
                if node.slot > 0:
                    node.state, node.returned = NodeState.MOVING, None
        for node in self.hosts.values():
            node.told = self.revision
        self.begun = self.revision
        for left in self.departures.values():
            left.revision, left.confirmed, left.dropped = self.revision, 0, False

    def _doubt(self, node: Node, state: NodeState) -> None:
        with self._change(self._affected(node), node):
            node.state = state

    def _remove(self, node: Node) -> None:
        self._take(node)
        del self.hosts[node.host]
        left = self._next
        confirmed = left if node.settled else node.confirmed
        self.departures[node.host] = Departure(node.host, left, confirmed, dropped=False)

    @contextmanager
    def _change(self, spots: Iterable[Spot], *must_confirm: Node) -> Iterator[None]:
        """Stamp the nodes that get other parents or children. The change may affect the lists of ``spots`` only.

        ``must_confirm``: nodes that have to confirm a new revision even if they keep their parents.
        """
        spots = set(spots)
        before = self._lists(spots)
        yield
        after = self._lists(spots)
        rerouted = [host for host in before.keys() | after.keys() if before.get(host) != after.get(host)]
        regained = {
            parent for host in rerouted for parent in set(before.get(host, ())) ^ set(after.get(host, ()))
        }  # they won or lost a child
        confirming = [*must_confirm, *(self.hosts[host] for host in rerouted if host in self.hosts)]
        if not confirming and not regained:
            return
        self.revision = self._next
        for host in regained & self.hosts.keys():
            self.hosts[host].revision = self.revision
        for node in confirming:
            node.revision = node.awaited = self.revision

    def _release(self) -> None:
        """Make returned hosts ordinary nodes once no host may read from them by an old list."""
        returned = [node for node in self.hosts.values() if node.returned is not None]
        in_use = self._in_use() if returned else []
        for node in returned:
            if _followed(node.host, node.returned or 0, in_use):
                continue
            with self._change([node.spot, *self._affected(node)]):
                node.returned = None
                if node.state is NodeState.RETURNING:
                    node.state = NodeState.READY if node.settled else NodeState.MOVING
            in_use = self._in_use()  # some have new lists to confirm

    def _in_use(self) -> list[tuple[str, int]]:
        """The two nodes that confirmed least of those with something to confirm, each with the oldest list in use.

        This is the oldest list by which the node may read, or a host from which it may read by such a list, and so on.
        Other nodes keep no older list in use. The second node matters for the first, which does not read from itself.
        """
        unsettled = (node for node in self.hosts.values() if node.slot > 0 and not node.settled)
        late = nsmallest(2, unsettled, key=attrgetter("confirmed"))
        reading = (departure for departure in self.departures.values() if not departure.dropped)
        left = sorted(reading, key=attrgetter("revision"), reverse=True)
        return [(node.host, _oldest(node.confirmed, left)) for node in late]


def _oldest(confirmed: int, left: Iterable[Departure]) -> int:
    """The oldest list in use if some host reads by any since ``confirmed``. ``left``: the last departure first."""
    for departure in left:
        if departure.revision > confirmed:  # some list in use names it: those that it may read by are in use as well
            confirmed = min(confirmed, departure.confirmed)
    return confirmed


def _followed(host: str, horizon: int, in_use: Iterable[tuple[str, int]]) -> bool:
    """Whether another host may read from this one by a list older than ``horizon``. ``in_use``: of Tree._in_use."""
    return any(oldest < horizon for other, oldest in in_use if other != host)
