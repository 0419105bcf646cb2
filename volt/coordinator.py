"""What hosts ask of Volt, each as one transaction: register, heartbeat, publish, join, leave, report, expire."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from sqlalchemy import Row, and_, func, select, update
from sqlalchemy.orm import Session

from volt.edgesecrets import edge_secret
from volt.errors import HostHasNode, HostUnknown, ImageConflict, ImageInUse, ImageUnknown, NodeUnknown, OriginNeeded
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
from volt.store import HostRow, ImageRow, Store, changing_tree, load_tree, node_table
from volt.tree import Node, Tree, depth, heap_children

log = logging.getLogger(__name__)

HEARTBEATS_PER_SECOND = 25
"""With many hosts the interval grows, so that Volt sees no more than this."""
LEASE_INTERVALS = 5
"""A lease lasts this many intervals at least: some heartbeats may get lost."""


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch as of now, then by a clock that nobody sets: a jump of the time evicts no host."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


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
        metrics: Metrics | None = None,
    ) -> None:
        """Leases count from this moment at the earliest: while Volt was down nobody could renew one."""
        self.store = store
        self.metrics = metrics or Metrics()
        self._policy = policy or Policy()
        self._now = now or steady_clock()
        self._started = self._now()
        self._next_expiry = self._started

    # Hosts

    def register(self, name: str, address: str) -> Host:
        """Register a host or refresh it."""
        with self.store.write() as session:
            row = session.get(HostRow, name, with_for_update={"key_share": True})
            if row is None:
                row = HostRow(name=name, address=address, state=HostState.ALIVE, last_seen=self._now())
                session.add(row)
                log.info("host %s registered at %s", name, address)
            self._seen(row)
            if row.address != address:
                row.address = address
                for image in _images_of(session, name):
                    with changing_tree(session, image) as tree:
                        tree.readdress(name)
            return _host(row)

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
                with changing_tree(session, image) as tree:
                    self._leave(tree, image, name)
            session.flush()  # its nodes have to go before it
            session.delete(row)
            log.info("host %s removed", name)

    def heartbeat(self, name: str, reports: list[NodeReport]) -> HeartbeatAnswer:
        """Renew the lease, take the host's word on its nodes, and answer with what changed.

        Raises:
            HostUnknown: it is not registered.
        """
        self.metrics.heartbeats.inc()
        reported = {report.image: report for report in reports}
        # Nearly all heartbeats bring nothing that would be missed after a power cut.
        with self.store.write(durable=False) as session:
            self._seen(_locked_host(session, name))
            interval = self._interval(session)
            stored = {row.name: row for row in session.execute(_NODES_OF.where(node_table.c.host == name))}
            for image in stored.keys() & reported.keys():
                _note(session, name, stored[image], reported[image])
        known = {image: reported[image].revision if image in reported else 0 for image in stored}
        news = [image for image, row in stored.items() if not row.revision <= known[image] <= row.confirmed]
        return HeartbeatAnswer(
            interval_s=interval,
            lease_s=self._lease(interval),
            assignments=[a for image in news for a in self._hear(name, image, known[image])],
            absent=sorted(reported.keys() - stored.keys()),
        )

    def _hear(self, host: str, name: str, revision: int) -> list[Assignment]:
        """A host follows this revision of its node's assignment. Returns the assignment if it is newer."""
        with self.store.write() as session:
            image = session.scalar(select(ImageRow).where(ImageRow.name == name).with_for_update())
            if image is None:
                return []
            with changing_tree(session, image) as tree:
                node = tree.hosts.get(host)
                if node is None:  # it left a moment ago
                    return []
                tree.confirm(host, revision)
            return [self._assignment(session, image, tree, node)] if node.revision > revision else []

    def expire(self) -> float:
        """Evict the hosts whose lease ran out. Returns the seconds until another one can run out."""
        now = self._now()
        with self.store.read() as session:
            lease = self._lease(self._interval(session))
            alive = select(HostRow.name, HostRow.last_seen).where(HostRow.state == HostState.ALIVE)
            seen = {name: max(last_seen, self._started) for name, last_seen in session.execute(alive)}
        for name in sorted(seen):
            if seen[name] < now - lease:
                self._evict(name, now - lease)
        self._next_expiry = min((last for last in seen.values() if last >= now - lease), default=now) + lease
        return self._next_expiry - now

    def _expire_if_due(self) -> None:
        if self._now() > self._next_expiry:
            self.expire()

    # Images

    def publish(self, request: PublishRequest) -> tuple[Image, bool]:
        """Publish an image or add an origin. Returns it and whether it is new.

        Raises:
            HostUnknown: the origin is not registered.
            ImageConflict: the name is taken by other content.
            HostHasNode: the origin reads the image from the tree.
        """
        with self.store.write() as session:
            self._seen(_locked_host(session, request.origin))
            image = session.scalar(select(ImageRow).where(ImageRow.name == request.name).with_for_update())
            if image is None:
                image = ImageRow(name=request.name, revision=0, published=False)
                session.add(image)
            new = not image.published
            if new:
                image.published = True
                image.size, image.digest, image.fanout = request.size, request.digest, self._policy.fanout
                log.info("image %s published by %s", request.name, request.origin)
            elif (image.size, image.digest) != (request.size, request.digest):
                raise ImageConflict(f"image {request.name} is published with digest {image.digest}, size {image.size}")
            with changing_tree(session, image) as tree:
                _add_origin(tree, request)
            return _image(image, tree), new

    def images(self) -> list[Image]:
        """All published images, by name."""
        with self.store.read() as session:
            published = select(ImageRow).where(ImageRow.published).order_by(ImageRow.name)
            return [_image(image, load_tree(session, image)) for image in session.scalars(published).all()]

    def image(self, name: str) -> Image:
        """One image.

        Raises:
            ImageUnknown: no such image.
        """
        with self.store.read() as session:
            image = _published(session, name)
            return _image(image, load_tree(session, image))

    def remove_image(self, name: str) -> None:
        """Withdraw an image.

        Raises:
            ImageUnknown: no such image.
            ImageInUse: hosts other than origins have it.
        """
        with self.store.write() as session:
            image = _published(session, name, lock=True)
            with changing_tree(session, image) as tree:
                users = tuple(tree.slots[slot].host for slot in range(1, tree.last + 1))
                if users:
                    raise ImageInUse(f"image {name} is in use by {', '.join(users)}", users)
                for origin in tree.origins:
                    tree.leave(origin.host)
            image.published = False
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

    def join(self, name: str, host: str) -> Assignment:
        """A place in the image's tree.

        Raises:
            ImageUnknown: no such image.
            HostUnknown: the host is not registered.
        """
        self._expire_if_due()
        with self.store.write() as session:
            self._seen(_locked_host(session, host))
            image = _published(session, name, lock=True)
            with changing_tree(session, image) as tree:
                node = tree.join(host)
            return self._assignment(session, image, tree, node)

    def leave(self, name: str, host: str, dropped: int = -1) -> None:
        """Give a place up. ``dropped``: as for Tree.leave.

        Raises:
            OriginNeeded: the host is the image's last origin.
        """
        with self.store.write() as session:
            image = session.scalar(select(ImageRow).where(ImageRow.name == name).with_for_update())
            if image is None:
                return
            with changing_tree(session, image) as tree:
                if host in tree.hosts:
                    self._leave(tree, image, host, dropped)

    def report(self, name: str, report: DeadParentReport) -> Assignment:
        """Hear that a parent does not answer; the reporter's assignment from now on.

        Raises:
            ImageUnknown: no such image.
            NodeUnknown: the reporter is not in the tree.
        """
        self.metrics.reports.inc()
        self._expire_if_due()
        with self.store.write() as session:
            image = _published(session, name, lock=True)
            with changing_tree(session, image) as tree:
                if report.reporter not in tree.hosts:
                    raise NodeUnknown(f"host {report.reporter} is not in the tree of image {name}")
                tree.suspect(report.reporter, report.dead)
            return self._assignment(session, image, tree, tree.hosts[report.reporter])

    def _assignment(self, session: Session, image: ImageRow, tree: Tree, node: Node) -> Assignment:
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

    def _seen(self, row: HostRow) -> None:
        if row.state is HostState.LOST:
            log.info("host %s is back", row.name)
        row.state, row.last_seen = HostState.ALIVE, self._now()

    def _interval(self, session: Session) -> float:
        alive = session.scalar(select(func.count()).where(HostRow.state == HostState.ALIVE)) or 0
        return max(self._policy.heartbeat_s, alive / HEARTBEATS_PER_SECOND)

    def _lease(self, interval: float) -> float:
        return max(self._policy.lease_s, LEASE_INTERVALS * interval)

    def _evict(self, name: str, seen_before: float) -> None:
        with self.store.write() as session:
            row = session.get(HostRow, name, with_for_update={"key_share": True})
            if row is None or row.state is HostState.LOST or row.last_seen >= seen_before:
                return
            row.state = HostState.LOST
            log.warning("the lease of host %s ran out", name)
            for image in _images_of(session, name):
                with changing_tree(session, image) as tree:
                    if tree.hosts[name].slot > 0:
                        self._leave(tree, image, name)
                    else:
                        tree.lose(name)

    def _leave(self, tree: Tree, image: ImageRow, host: str, dropped: int = -1) -> None:
        if [origin.host for origin in tree.origins] == [host]:
            raise OriginNeeded(f"host {host} is the last origin of image {image.name}")
        if tree.leave(host, dropped):
            self.metrics.moves.inc()
        log.info("host %s left the tree of image %s", host, image.name)


_NODES_OF = select(ImageRow.name, node_table).join(node_table).order_by(ImageRow.id)


def _locked_host(session: Session, name: str) -> HostRow:
    row = session.get(HostRow, name, with_for_update={"key_share": True})
    if row is None:
        raise HostUnknown(f"host {name} is not registered")
    return row


def _images_of(session: Session, host: str) -> list[ImageRow]:
    """The images in whose tree a host is, locked."""
    mine = select(ImageRow).join(node_table).where(node_table.c.host == host)
    return list(session.scalars(mine.order_by(ImageRow.id).with_for_update(of=ImageRow)))


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


def _image(image: ImageRow, tree: Tree) -> Image:
    return Image(
        name=image.name,
        size=image.size,
        digest=image.digest,
        origins=[origin.host for origin in tree.origins],
        nodes=tree.last,
        revision=image.revision,
    )


def _host(row: HostRow) -> Host:
    return Host(
        name=row.name, address=row.address, state=row.state, last_seen=datetime.fromtimestamp(row.last_seen, tz=UTC)
    )
