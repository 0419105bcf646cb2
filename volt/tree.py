"""An image's attach tree: who may read from whom, and why that never makes a loop.

Slots 1, 2, … are a complete k-ary heap below slot 0; the heap parent of slot i is (i - 1) // k. Origins, which hold
the whole image and read from nobody, are in slots 0, -1, -2, …; together they play the part of slot 0. A host reads
from its heap parent, else from the heap parent's siblings, else from its grandparent, else from an origin: always
from a smaller slot.

A host learns of a change late, and it may go on for long with an old list of parents. So the edges that may carry
data are more than those of the current lists: a host may use any list that it was given since the one it last
confirmed. It promises to follow the newest list that it has seen, never to go back, and to confirm a list only when
it reads from the parents of no older one. A host that has dropped all parents says so when it leaves. Nothing is
promised about other hosts that left or were evicted: those keep all edges they had.

Call what a host can reach over edges that may carry data its *reach*. A node is *offered* as a parent only while its
reach holds no node with a slot above its own, returning ones aside. Then no loop can come to be: an edge is added only
from a node to an offered node with a smaller slot, whose reach does not hold the former. These rules keep it so:

- *Join* takes a new last slot: nobody reads from the new node, and everything it may read from is in smaller slots.
- *Move.* When a node leaves, the node in the last slot takes its place. No offered node reaches the moved one, for
  that would have to be in a slot above the last; and the moved one is not offered (``moving``) until it confirmed
  that it reads only from its new parents. All other slots stay, and slots only ever become smaller.
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

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter

from volt.models import NodeState

OFFERED = frozenset({NodeState.JOINING, NodeState.READY})

FAR = 2**42
"""No revision is this far above those that are given now, be the store set back. In milliseconds these are 139 years:
more than passed since 1970, which is where a clock may stand that was never set.
"""


@dataclass(eq=False)
class Node:
    """A host's place in one tree.

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
    parent: str | None = None
    whole: bool = False

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


def sources(slot: int, fanout: int) -> list[int]:
    """The slots above 0 that a slot may read from, in order: heap parent, its siblings, grandparent."""
    parent = (slot - 1) // fanout
    if parent <= 0:
        return []
    grandparent = (parent - 1) // fanout
    return [parent, *siblings(parent, fanout), *([grandparent] if grandparent > 0 else [])]


def readers(slot: int, fanout: int) -> list[int]:
    """The slots that have this one among their ``sources``."""
    children = heap_children(slot, fanout)
    nieces = [niece for sibling in siblings(slot, fanout) for niece in heap_children(sibling, fanout)]
    grandchildren = [grandchild for child in children for grandchild in heap_children(child, fanout)]
    return [*children, *nieces, *grandchildren]


class Places:
    """Which host has which slot, and so who may read from whom."""

    def __init__(self, fanout: int, nodes: Iterable[Node]) -> None:
        self.fanout = fanout
        self.hosts = {node.host: node for node in nodes}
        self.slots = {node.slot: node for node in self.hosts.values()}

    @property
    def origins(self) -> list[Node]:
        """The origins, the one in slot 0 first."""
        return [self.slots[slot] for slot in range(0, -len(self.slots), -1) if slot in self.slots]

    @property
    def last(self) -> int:
        """The last slot in use."""
        return len(self.slots) - len(self.origins)

    def parents(self, node: Node) -> tuple[str, ...]:
        """The hosts that a node is to read from, in order of preference."""
        if node.slot <= 0:
            return ()
        peers = [] if node.returned is not None else sources(node.slot, self.fanout)
        nodes = [self.slots[slot] for slot in peers if self.slots[slot].state in OFFERED]
        offered = [peer.host for peer in sorted(nodes, key=lambda peer: not peer.whole)]
        origins = self.origins
        if not peers:
            # Only nodes without other parents are told which origins live: the death of an origin disturbs few.
            origins.sort(key=lambda origin: origin.state not in OFFERED)
        return (*offered, *(origin.host for origin in origins))

    def children(self, node: Node) -> list[str]:
        """The hosts that have a node among their parents."""
        if node.slot <= 0:
            return [self.slots[slot].host for slot in self._all_slots()]
        below = (self.slots[slot] for slot in readers(node.slot, self.fanout) if slot in self.slots)
        return [reader.host for reader in below if node.host in self.parents(reader)]

    def _place(self, node: Node, slot: int) -> None:
        if self.slots.get(node.slot) is node:
            del self.slots[node.slot]
        node.slot = slot
        self.slots[slot] = node
        self.hosts[node.host] = node

    def _all_slots(self) -> Iterable[int]:
        return range(1, self.last + 1)

    def _affected(self, node: Node) -> list[int]:
        """The slots whose lists may depend on a node's state."""
        if node.slot > 0:
            return readers(node.slot, self.fanout)
        returning = [other.slot for other in self.hosts.values() if other.returned is not None]
        return [*heap_children(0, self.fanout), *returning]

    def _lists(self, slots: set[int]) -> dict[str, tuple[str, ...]]:
        return {self.slots[slot].host: self.parents(self.slots[slot]) for slot in slots if slot in self.slots}


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
    ) -> None:
        """Take over what is stored: the tree changes these nodes and departures in place.

        ``begun``: the revision of the last alarm. ``floor``: all later revisions are at least this. It has to grow with
        time.
        """
        super().__init__(fanout, nodes)
        self.revision = revision
        self.begun = begun
        self.floor = floor
        self.departures = {departure.host: departure for departure in departures}

    def publish(self, host: str) -> Node:
        """Add an origin. It must not be in the tree."""
        self.departures.pop(host, None)
        node = Node(host, -len(self.origins), NodeState.JOINING, 0, 0, self.revision, self.revision)
        with self._change(self._all_slots(), node):
            self._place(node, node.slot)
        return node

    def join(self, host: str) -> Node:
        """The host's node; a new one if it has none.

        A join that is repeated gets a new revision: to have dropped earlier lists says nothing of a later join's.
        """
        if host in self.hosts:
            with self._change((), self.hosts[host]):
                return self.hosts[host]
        left = self.departures.pop(host, None)
        node = Node(host, self.last + 1, NodeState.JOINING, 0, 0, self.revision, self.revision)
        if left and not (left.dropped and not _followed(host, left.revision, self._in_use())):
            node.state, node.returned = NodeState.RETURNING, left.revision
            node.confirmed = self.revision if left.dropped else 0
        with self._change([node.slot]):
            self._place(node, node.slot)
        self._release()
        return node

    def leave(self, host: str, dropped: int = -1) -> bool:
        """Take a host out; the node in the last slot takes its place. Returns whether another node moved.

        ``dropped``: the host reads by no list of this revision or older ones; it may by those that it was given later.
        """
        node = self.hosts[host]
        is_origin = node.slot <= 0
        mover = self.origins[-1] if is_origin else self.slots[self.last]
        reads_anew = mover is not node and not is_origin
        changed = self._all_slots() if is_origin else [node.slot, mover.slot, *readers(node.slot, self.fanout)]
        with self._change(changed, *([mover] if reads_anew else [])):
            self._remove(node)
            if mover is not node:
                self._place(mover, node.slot)
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
        with self._change(self._all_slots(), *self.hosts.values()):
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
        del self.slots[node.slot], self.hosts[node.host]
        left = self._next
        confirmed = left if node.settled else node.confirmed
        self.departures[node.host] = Departure(node.host, left, confirmed, dropped=False)

    @contextmanager
    def _change(self, slots: Iterable[int], *must_confirm: Node) -> Iterator[None]:
        """Stamp the nodes that get other parents or children. The change may affect the lists of ``slots`` only.

        ``must_confirm``: nodes that have to confirm a new revision even if they keep their parents.
        """
        slots = set(slots)
        before = self._lists(slots)
        yield
        after = self._lists(slots)
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
            with self._change([node.slot, *self._affected(node)]):
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
