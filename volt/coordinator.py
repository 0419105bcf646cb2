"""What hosts ask of Volt, each as one transaction: register, heartbeat, publish, join, leave, report, expire.

Each call of a host names the ``agent`` that makes it, by an id. A host's name belongs to one agent as long as that
agent's lease runs: calls of another agent raise HostTaken and change nothing.

An image is *withdrawn* by a column of the database. Each answer to a heartbeat names the reported images that are
withdrawn, so no host remembers that, and no lost or late answer does harm. An origin asks once more before it removes
its stack, under the lock that a publish holds. Volt tells an origin only when no other host has the image, or may have
VMs of it: such a host is awaited until it joins, publishes, leaves for good, or reports that it has nothing. The row
of a withdrawn image stays, to answer which retained data hosts may delete.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from sqlalchemy import Row, Select, and_, delete, func, insert, select, update
from sqlalchemy.orm import Session

from volt.edgesecrets import edge_secret
from volt.errors import (
    HostHasNode,
    HostTaken,
    HostUnknown,
    ImageConflict,
    ImageInUse,
    ImageUnknown,
    ImageWithdrawn,
    NodeUnknown,
    OriginNeeded,
)
from volt.metrics import Metrics
from volt.models import (
    Assignment,
    Child,
    DeadParentReport,
    HeartbeatAnswer,
    Host,
    HostState,
    Image,
    ImageTree,
    NodeReport,
    Parent,
    PublishRequest,
    TreeNode,
)
from volt.store import (
    HostRow,
    ImageRow,
    Store,
    changing_tree,
    count_nodes,
    departure_table,
    eviction_table,
    find_awaited,
    find_needed,
    find_origins,
    find_unneeded,
    load_tree,
    node_table,
)
from volt.tree import Node, Tree, depth, heap_children

log = logging.getLogger(__name__)

HEARTBEATS_PER_SECOND = 25
"""With many hosts the interval grows, so that Volt sees no more than this."""
LEASE_INTERVALS = 5
"""A lease lasts this many intervals at least: some heartbeats may get lost."""
LOOKS_PER_LEASE = 10
"""How often in a lease's time the store is asked whether it still answers."""
EVICTED_AT_ONCE = 50
"""As many at most in one transaction: it loads and stores each of their trees only once, but others wait for it."""


def steady_clock(
    time_of_day: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Seconds since the epoch as of now, then by a clock that nobody sets: a jump of the time evicts no host."""
    offset = time_of_day() - steady()
    return lambda: offset + steady()


@dataclass(frozen=True)
class Policy:
    """``heartbeat_s``: the interval while there are few hosts. ``lease_s``: the shortest lease. Both in seconds."""

    fanout: int = 2
    heartbeat_s: float = 2.0
    lease_s: float = 10.0


class Coordinator:
    """Volt without HTTP. May be shared by threads."""

    def __init__(
        self,
        store: Store,
        policy: Policy | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        """Leases count from this moment at the earliest: while Volt was down nobody could renew one.

        ``now``: seconds since the epoch, by a clock that is never set back; revisions are made from it too.
        """
        self.store = store
        self.metrics = Metrics(store)
        self._policy = policy or Policy()
        self._now = now or steady_clock()
        self._expiring = threading.Lock()
        self._since = self._answered = self._next_expiry = self._now()
        self._failures = store.failures

    # Hosts

    def register(self, name: str, address: str, agent: str = "") -> Host:
        """Register a host or refresh it.

        Raises:
            HostTaken: another agent has the name.
        """
        with self.store.write() as session:
            row = session.get(HostRow, name, with_for_update={"key_share": True})
            if row is None:
                row = HostRow(name=name, address=address, state=HostState.ALIVE, last_seen=self._now(), agent=agent)
                session.add(row)
                log.info("host %s registered at %s", name, address)
            self._seen(row, agent)
            self._readdress(session, row, address)
            return _host(row)

    def _readdress(self, session: Session, row: HostRow, address: str) -> None:
        if row.address == address:
            return
        row.address = address
        for image in _images_of(session, row.name):
            with self._changing(session, image) as tree:
                if row.name in tree.hosts:
                    tree.readdress(row.name)

    def hosts(self) -> list[Host]:
        """All registered hosts, by name."""
        with self.store.read() as session:
            return [_host(row) for row in session.scalars(select(HostRow).order_by(HostRow.name))]

    def remove_host(self, name: str) -> None:
        """Take a host out of all trees and forget it.

        Raises:
            OriginNeeded: it is the last origin of an image.
        """
        with self.store.write() as session:
            row = session.get(HostRow, name, with_for_update=True)
            if row is None:
                return
            for image in _images_of(session, name):
                with self._changing(session, image) as tree:
                    if name in tree.hosts:
                        self._leave(tree, image, name)
            session.execute(delete(eviction_table).where(eviction_table.c.host == name))
            session.delete(row)
            log.info("host %s removed", name)

    def heartbeat(
        self,
        name: str,
        reports: list[NodeReport],
        kept: Collection[str] = (),
        needed: Collection[str] = (),
        address: str | None = None,
        agent: str = "",
    ) -> HeartbeatAnswer:
        """Renew the lease, take the host's word on its nodes, and answer with what changed.

        ``kept``: digests of content that it keeps without a stack. ``needed``: images that it may need though it does
        not report them. ``address``: the host's address, which corrects another one.

        Raises:
            HostUnknown: it is not registered.
            HostTaken: another agent has the name.
        """
        self.metrics.heartbeats.inc()
        reported = {report.image: report for report in reports}
        # Nearly all heartbeats bring nothing that would be missed after a power cut.
        with self.store.write(durable=False) as session:
            row = _locked_host(session, name)
            self._seen(row, agent)
            if address is not None:
                self._readdress(session, row, address)
            interval = self._interval(session)
            lease = row.lease_s = self._lease(interval)
            stored = {row.name: row for row in session.execute(_NODES_OF.where(node_table.c.host == name))}
            for image, node in stored.items():  # in the order of all who change several trees
                if image in reported:
                    _note(session, name, node, reported[image])
            strays = session.execute(_left(name, reported.keys() - stored.keys())).all()
            _forget_evictions(session, name, {*reported, *needed})
            withdrawn = _to_let_go(session, stored)
            discard = find_unneeded(session, kept) if kept else ()
        for image, left in strays:
            if reported[image].revision > left:  # else it is known to have this, which needs no look at the whole tree
                self._hear_stray(name, image, reported[image].revision)
        known = {image: reported[image].revision if image in reported else 0 for image in stored}
        news = [image for image, row in stored.items() if not row.revision <= known[image] <= row.confirmed]
        return HeartbeatAnswer(
            interval_s=interval,
            lease_s=lease,
            assignments=[a for image in news for a in self._hear(name, image, known[image])],
            absent=sorted(reported.keys() - stored.keys()),
            withdrawn=sorted(withdrawn & reported.keys()),
            discard=sorted(discard),
        )

    def _hear(self, host: str, name: str, revision: int) -> list[Assignment]:
        """A host follows this revision of its node's assignment. Returns the assignment if it is newer."""
        with self.store.write() as session:
            image = session.scalar(select(ImageRow).where(ImageRow.name == name).with_for_update())
            if image is None:
                return []
            with self._changing(session, image) as tree:
                node = tree.hosts.get(host)
                if node is None or not _credible(tree, name, host, revision):  # None: it left a moment ago
                    return []
                if not tree.confirm(host, revision):
                    _warn_of_setback(name, host, revision)
                return [self._assignment(session, image, tree, host)] if node.revision > revision else []

    def _hear_stray(self, host: str, name: str, revision: int) -> None:
        """A host without a place in the image's tree has this revision of an assignment."""
        with self.store.write() as session:
            image = session.scalar(select(ImageRow).where(ImageRow.name == name).with_for_update())
            if image is None or not image.published:
                return
            with self._changing(session, image) as tree:
                if host in tree.hosts or not _credible(tree, name, host, revision):
                    return
                if not tree.stray(host, revision):
                    _warn_of_setback(name, host, revision)

    def expire(self) -> float:
        """Evict the hosts whose lease ran out. Returns the seconds until this should be called again.

        A host's lease is the one that it was told, however many hosts there are now: by that it chose when to be heard
        of again. Nobody is evicted before it had that time since the store answers: a transaction that failed, or a
        longer time without a call of this, says that store or Volt were away, and nobody could renew a lease.

        While another thread is at it this does nothing: when many are evicted at once, nobody has to wait for the last.
        """
        if not self._expiring.acquire(blocking=False):
            return self._policy.lease_s / LOOKS_PER_LEASE
        try:
            return self._expire()
        finally:
            self._expiring.release()

    def _expire(self) -> float:
        with self.store.write(durable=False) as session:  # a store that takes no heartbeat does not answer
            lease = self._lease(self._interval(session))
            alive = select(HostRow.name, HostRow.last_seen, HostRow.lease_s)
            rows = session.execute(alive.where(HostRow.state == HostState.ALIVE)).all()
        self._note_answer()
        now = self._now()
        ends = {name: self._end(last_seen, told, lease) for name, last_seen, told in rows}
        silent = sorted(name for name, end in ends.items() if end < now)
        for first in range(0, len(silent), EVICTED_AT_ONCE):
            self._evict(silent[first : first + EVICTED_AT_ONCE], now, lease)
        self._next_expiry = min((end for end in ends.values() if end >= now), default=now + lease)
        return min(self._next_expiry - now, self._policy.lease_s / LOOKS_PER_LEASE)

    def _note_answer(self) -> None:
        """The store answers now. Did it since this was noted last? Else all leases begin anew."""
        now, failures = self._now(), self.store.failures
        if failures != self._failures or now - self._answered > self._policy.lease_s / 2:
            log.warning("the store, or Volt, was away: all leases begin anew")
            self._since = now
        self._answered, self._failures = now, failures

    def _expire_if_due(self) -> None:
        if self._now() > self._next_expiry:
            self.expire()

    # Images

    def publish(self, request: PublishRequest, agent: str = "") -> tuple[Image, bool]:
        """Publish an image or add an origin; one that is withdrawn is so no more. Returns it and whether it is new.

        Raises:
            HostUnknown: the origin is not registered.
            HostTaken: another agent has the origin's name.
            ImageConflict: the name is taken by other content.
            HostHasNode: the origin reads the image from the tree.
        """
        with self.store.write() as session:
            self._seen(_locked_host(session, request.origin), agent)
            image = session.scalar(select(ImageRow).where(ImageRow.name == request.name).with_for_update())
            if image is None:
                image = ImageRow(name=request.name, revision=0, begun=0, published=False)
                session.add(image)
            new = not image.published
            if new:
                image.published = True
                image.size, image.digest, image.fanout = request.size, request.digest, self._policy.fanout
                log.info("image %s published by %s", request.name, request.origin)
            elif (image.size, image.digest) != (request.size, request.digest):
                how = "being withdrawn, and not gone yet," if image.withdrawn else "published"
                raise ImageConflict(f"image {request.name} is {how} with digest {image.digest}, size {image.size}")
            elif image.withdrawn:
                log.info("image %s is not withdrawn any more: %s published it again", request.name, request.origin)
            image.withdrawn = False
            with self._changing(session, image) as tree:
                _forget_eviction(session, image, request.origin)
                _add_origin(tree, request)
            return _image(image, [origin.host for origin in tree.origins], tree.last), new

    def images(self) -> list[Image]:
        """All published images, by name."""
        with self.store.read() as session:
            published = select(ImageRow).where(ImageRow.published).order_by(ImageRow.name)
            return _images(session, session.scalars(published).all())

    def image(self, name: str) -> Image:
        """One image.

        Raises:
            ImageUnknown: no such image.
        """
        with self.store.read() as session:
            return _images(session, [_published(session, name)])[0]

    def remove_image(self, name: str, *, when_unused: bool = False) -> None:
        """Withdraw an image. ``when_unused``: no new VM gets it, and its origins remove it when no host has it.

        Raises:
            ImageUnknown: no such image.
            ImageInUse: hosts other than origins have it, or may need it; never ``when_unused``.
        """
        with self.store.write() as session:
            image = _published(session, name, lock=True)
            if when_unused:
                log.info("image %s is withdrawn: it goes when nobody needs it any more", name)
                image.withdrawn = True
                return
            with self._changing(session, image) as tree:
                users = (*(tree.slots[slot].host for slot in range(1, tree.last + 1)), *find_awaited(session, image))
                if users:
                    raise ImageInUse(f"image {name} is in use by {', '.join(users)}", users)
                for origin in tree.origins:
                    tree.leave(origin.host)
            image.published = False
            session.execute(delete(eviction_table).where(eviction_table.c.image_id == image.id))
            log.info("image %s removed", name)

    def tree(self, name: str) -> ImageTree:
        """An image's tree.

        Raises:
            ImageUnknown: no such image.
        """
        self._expire_if_due()
        with self.store.read() as session:
            image = _published(session, name)
            tree = load_tree(session, image)
            return ImageTree(
                image=image.name,
                size=image.size,
                digest=image.digest,
                revision=tree.revision,
                fanout=tree.fanout,
                root=_tree_node(tree, tree.slots[0]),
                origins=[_tree_node(tree, origin) for origin in tree.origins[1:]],
            )

    # Nodes

    def join(self, name: str, host: str, agent: str = "", *, moving: bool = False) -> Assignment:
        """A place in the image's tree. ``moving``: for a disk of the image that comes from another host.

        Raises:
            ImageUnknown: no such image.
            ImageWithdrawn: it is withdrawn, and the host has not got it; never for a disk that is ``moving``.
            HostUnknown: the host is not registered.
            HostTaken: another agent has the host's name.
        """
        self._expire_if_due()
        with self.store.write() as session:
            self._seen(_locked_host(session, host), agent)
            image = _published(session, name, lock=True)
            with self._changing(session, image) as tree:
                # Who lost its place with its lease may have VMs that need the image.
                evicted = _forget_eviction(session, image, host)
                if image.withdrawn and host not in tree.hosts and not evicted and not moving:
                    raise ImageWithdrawn(f"image {name} is withdrawn: only hosts that have it may use it")
                tree.join(host)
                return self._assignment(session, image, tree, host)

    def leave(self, name: str, host: str, dropped: int = -1, agent: str = "", *, needed: bool = False) -> None:
        """Give a place up. ``dropped``: as for Tree.leave.

        ``needed``: the host may have VMs that need the image. Like a host whose lease ran out, it is awaited until it
        reports that it has nothing of the image.

        Raises:
            OriginNeeded: the host is the image's last origin.
            HostTaken: another agent has the host's name.
        """
        with self.store.write() as session:
            _check_agent(session, host, agent)
            image = session.scalar(select(ImageRow).where(ImageRow.name == name).with_for_update())
            if image is None:
                return
            with self._changing(session, image) as tree:
                awaited = _forget_eviction(session, image, host)
                if needed and (awaited or host in tree.hosts):
                    session.execute(insert(eviction_table).values(image_id=image.id, host=host))
                if host in tree.hosts:
                    self._leave(tree, image, host, dropped)

    def report(self, name: str, report: DeadParentReport, agent: str = "") -> Assignment:
        """Hear that a parent does not answer; the reporter's assignment from now on.

        Raises:
            ImageUnknown: no such image.
            NodeUnknown: the reporter is not in the tree.
            HostTaken: another agent has the reporter's name.
        """
        self.metrics.reports.inc()
        self._expire_if_due()
        with self.store.write() as session:
            _check_agent(session, report.reporter, agent)
            image = _published(session, name, lock=True)
            with self._changing(session, image) as tree:
                if report.reporter not in tree.hosts:
                    raise NodeUnknown(f"host {report.reporter} is not in the tree of image {name}")
                tree.suspect(report.reporter, report.dead)
                return self._assignment(session, image, tree, report.reporter)

    def _changing(self, session: Session, image: ImageRow) -> AbstractContextManager[Tree]:
        """The tree, to change it. Revisions count milliseconds at least: a store that is set back gives none again."""
        return changing_tree(session, image, floor=int(self._now() * 1000))

    def _assignment(self, session: Session, image: ImageRow, tree: Tree, host: str) -> Assignment:
        """What a host is told now."""
        node = tree.tell(host)
        parents = tree.parents(node)
        query = select(HostRow.name, HostRow.address).where(HostRow.name.in_(parents))
        addresses = dict(session.execute(query).all())
        secret = partial(edge_secret, self.store.edge_key, image.name)
        return Assignment(
            image=image.name,
            size=image.size,
            digest=image.digest,
            slot=node.slot,
            revision=node.revision,
            state=node.state,
            parents=[Parent(host=name, address=addresses[name], secret=secret(name, node.host)) for name in parents],
            children=[Child(host=name, secret=secret(node.host, name)) for name in tree.children(node)],
        )

    def _seen(self, row: HostRow, agent: str) -> None:
        """Note that this agent was heard of, and that the host's name is its. Raises HostTaken."""
        _check_holder(row, agent)
        if row.state is HostState.LOST:
            log.info("host %s is back", row.name)
        row.state, row.last_seen, row.agent = HostState.ALIVE, self._now(), agent

    def _interval(self, session: Session) -> float:
        alive = session.scalar(select(func.count()).where(HostRow.state == HostState.ALIVE)) or 0
        return max(self._policy.heartbeat_s, alive / HEARTBEATS_PER_SECOND)

    def _lease(self, interval: float) -> float:
        return max(self._policy.lease_s, LEASE_INTERVALS * interval)

    def _end(self, last_seen: float, told: float | None, lease: float) -> float:
        """When the lease of a host runs out. ``told``: the one that it was told; ``lease``: that of now."""
        return max(last_seen, self._since) + (lease if told is None else told)

    def _evict(self, names: Collection[str], now: float, lease: float) -> None:
        """Evict those of these hosts that were still not heard of."""
        with self.store.write() as session:
            hosts = select(HostRow).where(HostRow.name.in_(names)).order_by(HostRow.name)
            rows = session.scalars(hosts.with_for_update(key_share=True)).all()
            self._note_answer()  # this transaction may have waited for long
            alive = [row for row in rows if row.state is not HostState.LOST]
            silent = [row for row in alive if self._end(row.last_seen, row.lease_s, lease) < now]
            for row in silent:
                row.state = HostState.LOST
                log.warning("the lease of host %s ran out", row.name)
            for image in _images_of(session, *(row.name for row in silent)):
                with self._changing(session, image) as tree:
                    for row in silent:
                        self._lose(session, tree, image, row.name)

    def _lose(self, session: Session, tree: Tree, image: ImageRow, host: str) -> None:
        if host not in tree.hosts:
            return  # it never was in this one, or left it while the image's lock was awaited
        if tree.hosts[host].slot > 0:
            self._leave(tree, image, host)
            session.execute(insert(eviction_table).values(image_id=image.id, host=host))
        else:
            tree.lose(host)

    def _leave(self, tree: Tree, image: ImageRow, host: str, dropped: int = -1) -> None:
        if [origin.host for origin in tree.origins] == [host]:
            raise OriginNeeded(f"host {host} is the last origin of image {image.name}: remove the image instead")
        if tree.leave(host, dropped):
            self.metrics.moves.inc()
        log.info("host %s left the tree of image %s", host, image.name)


_NODES_OF = select(ImageRow.name, ImageRow.withdrawn, node_table).join(node_table).order_by(ImageRow.id)


def _locked_host(session: Session, name: str) -> HostRow:
    row = session.get(HostRow, name, with_for_update={"key_share": True})
    if row is None:
        raise HostUnknown(f"host {name} is not registered")
    return row


def _check_agent(session: Session, host: str, agent: str) -> None:
    """Raises HostTaken. A host that is not registered belongs to no agent."""
    row = session.get(HostRow, host, with_for_update={"key_share": True})
    if row is not None:
        _check_holder(row, agent)


def _check_holder(row: HostRow, agent: str) -> None:
    """Raises HostTaken if the host's name belongs to another agent whose lease has not run out."""
    if row.state is HostState.ALIVE and row.agent not in ("", agent):
        raise HostTaken(
            f"another agent runs under the host name {row.name}, at {row.address}: give one of the two agents another"
            " --name; or stop the other one for good, and the name is free when its lease has run out, or after:"
            f" volt hosts remove {row.name}"
        )


def _images_of(session: Session, *hosts: str) -> list[ImageRow]:
    """The images in whose trees these hosts are, locked. They may have left one while the lock was awaited."""
    theirs = select(node_table.c.image_id).where(node_table.c.host.in_(hosts))
    images = select(ImageRow).where(ImageRow.id.in_(theirs)).order_by(ImageRow.id)
    return list(session.scalars(images.with_for_update()))


def _left(host: str, names: Collection[str]) -> Select[str, int]:
    """Those of these images that are published, each with the revision at which the host left it; 0 if it did not."""
    here = and_(departure_table.c.image_id == ImageRow.id, departure_table.c.host == host)
    left = func.coalesce(departure_table.c.revision, 0)
    query = select(ImageRow.name, left).outerjoin(departure_table, here)
    return query.where(ImageRow.name.in_(names), ImageRow.published)


def _forget_eviction(session: Session, image: ImageRow, host: str) -> bool:
    """A host that was evicted is back, or does not need the image. Returns whether it was."""
    here = and_(eviction_table.c.image_id == image.id, eviction_table.c.host == host)
    return session.connection().execute(delete(eviction_table).where(here)).rowcount > 0


def _forget_evictions(session: Session, host: str, needed: Collection[str]) -> None:
    """A host that was evicted is back, and needs these images only."""
    lost = select(eviction_table.c.image_id, ImageRow.name).join(ImageRow).where(eviction_table.c.host == host)
    gone = [image for image, name in session.execute(lost) if name not in needed]
    if gone:
        here = and_(eviction_table.c.host == host, eviction_table.c.image_id.in_(gone))
        session.execute(delete(eviction_table).where(here))


def _to_let_go(session: Session, stored: Mapping[str, Row[Any]]) -> set[str]:
    """Those of a host's images that are withdrawn; of those that it is an origin of, only what no other host needs."""
    withdrawn = {name: row for name, row in stored.items() if row.withdrawn}
    needed = find_needed(session, [row.image_id for row in withdrawn.values()]) if withdrawn else ()
    return {name for name, row in withdrawn.items() if row.slot > 0 or row.image_id not in needed}


def _warn_of_setback(image: str, host: str, revision: int) -> None:
    log.warning(
        "image %s: host %s has revision %d, which this database has not given: it was set back to an old copy. "
        "All hosts read from the origins until they have confirmed new parents",
        image,
        host,
        revision,
    )


def _credible(tree: Tree, image: str, host: str, revision: int) -> bool:
    """Whether the host can have this revision. If not, that is its fault, and what it says of the image is ignored."""
    credible = tree.credible(revision)
    if not credible:
        log.warning("image %s: host %s says that it has revision %d, which nobody can have", image, host, revision)
    return credible


def _published(session: Session, name: str, lock: bool = False) -> ImageRow:
    query = select(ImageRow).where(ImageRow.name == name, ImageRow.published)
    image = session.scalar(query.with_for_update() if lock else query)
    if image is None:
        raise ImageUnknown(f"no image {name} is published")
    return image


def _note(session: Session, host: str, stored: Row[Any], report: NodeReport) -> None:
    """Keep what a host says about its reading."""
    news = {"fetched_bytes": report.fetched_bytes, "parent": report.parent}
    if any(getattr(stored, name) != value for name, value in news.items()):
        here = and_(node_table.c.image_id == stored.image_id, node_table.c.host == host)
        session.execute(update(node_table).where(here).values(news))


def _add_origin(tree: Tree, request: PublishRequest) -> None:
    node = tree.hosts.get(request.origin)
    if node is None:
        tree.publish(request.origin)
    elif node.slot > 0:
        raise HostHasNode(f"host {request.origin} reads image {request.name} from the tree: leave first")


def _tree_node(tree: Tree, node: Node) -> TreeNode:
    below = heap_children(node.slot, tree.fanout) if node.slot >= 0 else ()
    return TreeNode(
        host=node.host,
        slot=node.slot,
        state=node.state,
        depth=depth(node.slot, tree.fanout),
        revision=node.revision,
        confirmed=node.confirmed,
        fetched_bytes=node.fetched_bytes,
        parent=node.parent,
        children=[_tree_node(tree, tree.slots[slot]) for slot in below if slot in tree.slots],
    )


def _images(session: Session, images: Sequence[ImageRow]) -> list[Image]:
    """These images; their trees, which may have very many hosts, are not loaded."""
    ids = [image.id for image in images]
    origins, nodes = find_origins(session, ids), count_nodes(session, ids)
    return [_image(image, origins.get(image.id, []), nodes.get(image.id, 0)) for image in images]


def _image(image: ImageRow, origins: list[str], nodes: int) -> Image:
    return Image(
        name=image.name,
        size=image.size,
        digest=image.digest,
        origins=origins,
        nodes=nodes,
        revision=image.revision,
        withdrawn=image.withdrawn,
    )


def _host(row: HostRow) -> Host:
    return Host(
        name=row.name, address=row.address, state=row.state, last_seen=datetime.fromtimestamp(row.last_seen, tz=UTC)
    )
