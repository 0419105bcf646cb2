"""What hosts and administrators ask of Volt, each call in transactions of its own.

Each call of a host names the ``agent`` that makes it, by an id. A host's name belongs to one agent as long as that
agent's lease runs: calls of another agent raise HostTaken and change nothing. Each call renews the lease.

An image is *withdrawn* by a column of the database. Each answer to a heartbeat names the reported images that are
withdrawn, so no host remembers that, and no lost or late answer does harm. An origin asks once more before it removes
its stack, under the lock that a publish holds. Volt tells an origin only when no other host has the image, or may have
VMs of it: such a host is awaited until it joins, publishes, leaves for good, or reports that it has nothing. The row
of a withdrawn image stays, to answer which retained data hosts may delete.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial

from sqlalchemy import select
from sqlalchemy.orm import Session

from volt import bootsets, queries
from volt.deployments import Deployments
from volt.deploymodels import TransferReport
from volt.edgesecrets import edge_secret, serving_key, ticket
from volt.errors import HostHasNode, ImageConflict, ImageInUse, ImageWithdrawn, NodeUnknown
from volt.leases import Leases, Policy, leave_tree, steady_clock
from volt.metrics import Metrics
from volt.models import (
    Assignment,
    BootSet,
    Child,
    HeartbeatAnswer,
    Host,
    HostState,
    Image,
    ImageTree,
    NodeReport,
    Parent,
    TreeNode,
)
from volt.store import BootSetRow, HostRow, ImageRow, Store, changing_tree, load_tree
from volt.tree import Node, Tree

log = logging.getLogger(__name__)

PATIENT_INTERVALS = 3.0
"""Heartbeats in which each host has heard what it has to do, and has answered."""


class Coordinator:
    """Volt without HTTP. May be shared by threads. ``volt.client.VoltClient`` has the same calls, and describes them.

    ``now``: seconds since the epoch, by a clock that is never set back; revisions are made from it too.
    """

    def __init__(self, store: Store, policy: Policy | None = None, now: Callable[[], float] | None = None) -> None:
        self.store = store
        self.metrics = Metrics(store)
        self._policy = policy or Policy()
        self._now = now or steady_clock()
        self.deployments = Deployments(store, self._now)
        self.leases = Leases(store, self._policy, self._now, self.metrics, self.deployments)

    def register(
        self, host: str, address: str, place: str | None = None, methods: Sequence[str] | None = None, *,
        agent: str = "",
    ) -> Host:  # fmt: skip
        """Register a host or refresh it. Raises HostTaken."""
        with self.store.write() as session:
            row = session.get(HostRow, host, with_for_update={"key_share": True})
            if row is None:
                row = HostRow(name=host, address=address, state=HostState.ALIVE, last_seen=self._now(), agent=agent)
                row.place = place or ""
                session.add(row)
                log.info("host %s registered at %s", host, address)
            self.leases.renew(row, agent)
            self._note_address(session, row, address)
            self._note_place(session, row, place)
            if methods is not None:
                row.methods = _words(methods)
            return Host.model_validate(row, from_attributes=True)

    def hosts(self) -> list[Host]:
        with self.store.read() as session:
            whole = queries.whole_images(session)
            rows = session.scalars(select(HostRow).order_by(HostRow.name))
            hosts = [Host.model_validate(row, from_attributes=True) for row in rows]
            return [host.model_copy(update={"whole": whole.get(host.name, [])}) for host in hosts]

    def remove_host(self, host: str) -> None:
        """Remove a host from all trees and delete it. Raises OriginNeeded."""
        with self.store.write() as session:
            row = session.get(HostRow, host, with_for_update=True)
            if row is None:
                return
            for image in queries.images_of(session, host):
                with changing_tree(session, image, self._now()) as tree:
                    if host in tree.hosts:
                        leave_tree(tree, image, host, self.metrics)
            queries.end_waiting(session, queries.departures_of(session, host))
            ended = self.deployments.lose(session, [host])
            session.delete(row)
            log.info("host %s removed", host)
        self.deployments.settle(ended)

    def heartbeat(
        self,
        host: str,
        nodes: Sequence[NodeReport],
        kept: Sequence[str] = (),
        needed: Sequence[str] = (),
        address: str | None = None,
        place: str | None = None,
        transfers: Sequence[TransferReport] | None = (),
        methods: Sequence[str] = (),
        *,
        agent: str = "",
    ) -> HeartbeatAnswer:
        """Renew the lease, note what the host reports, and answer with what changed. Raises HostUnknown, HostTaken."""
        self.metrics.heartbeats.inc()
        reported = {report.image: report for report in nodes}
        # Nearly all heartbeats bring nothing that would be missed after a power cut.
        with self.store.write(durable=False) as session:
            row = self._caller(session, host, agent)
            self._note_address(session, row, address)
            self._note_place(session, row, place)
            row.methods = _words(methods)
            interval, lease = self.leases.terms(session)
            row.lease_s = lease
            tasks, touched = self.deployments.hear(session, host, transfers)
            stored = queries.nodes_of(session, host)
            for image, node in stored.items():  # in the order of all calls that change several trees
                if image in reported:
                    queries.note_report(session, host, node, reported[image])
            filled = [
                image for image, node in stored.items() if image in reported and node.whole != reported[image].whole
            ]
            absent = reported.keys() - stored.keys()
            left = queries.departures_of(session, host, absent)
            queries.end_waiting(session, left, {*reported, *needed})
            withdrawn = queries.withdrawn_images(session, stored)
            discard = queries.unneeded_digests(session, kept)
            patience = PATIENT_INTERVALS * interval
            if tasks:
                interval = min(interval, self.deployments.interval(session))
        self.deployments.settle(touched, patience)
        for image in filled:
            self._note_whole(host, image, whole=reported[image].whole)
        # A host that reports what Volt knows needs no look at a tree.
        known = {image: reported[image].revision if image in reported else 0 for image in {**reported, **stored}}
        orphans = {name: row for name, row in left.items() if name in absent and row.published}
        news = [name for name, row in orphans.items() if known[name] > (row.revision or 0)]
        news += [name for name, node in stored.items() if not node.revision <= known[name] <= node.confirmed]
        return HeartbeatAnswer(
            interval_s=interval,
            lease_s=lease,
            assignments=[assignment for image in news for assignment in self._hear(host, image, known[image])],
            absent=sorted(absent),
            withdrawn=sorted(withdrawn & reported.keys()),
            discard=sorted(discard),
            transfers=tasks,
        )

    def publish(
        self, name: str, size: int, digest: str, origin: str, parent: str | None = None, *, agent: str = ""
    ) -> tuple[Image, bool]:
        """Publish an image or add an origin. Returns the image and whether its name is new.

        An origin that knows no ``parent`` leaves the one that another origin has named.

        A withdrawn image is withdrawn no more. Raises HostUnknown, HostTaken, ImageConflict, HostHasNode.
        """
        with self.store.write() as session:
            place = self._caller(session, origin, agent).place
            image = queries.locked_image(session, name)
            if image is None:
                image = ImageRow(name=name, revision=0, begun=0, published=False)
                session.add(image)
            new = not image.published
            if new:
                image.published = True
                image.size, image.digest, image.fanout = size, digest, self._policy.fanout
                image.parent = None  # that of an image that had the name before
                image.home = place
                log.info("image %s published by %s", name, origin)
            elif (image.size, image.digest) != (size, digest):
                how = "being withdrawn, and not gone yet," if image.withdrawn else "published"
                raise ImageConflict(f"image {name} is {how} with digest {image.digest}, size {image.size}")
            elif image.withdrawn:
                log.info("image %s is not withdrawn any more: %s published it again", name, origin)
            image.withdrawn = False
            image.parent = parent or image.parent
            with changing_tree(session, image, self._now()) as tree:
                if origin not in tree.hosts:
                    tree.publish(origin, place)
                elif tree.hosts[origin].slot > 0:
                    raise HostHasNode(f"host {origin} reads image {name} from the tree: leave first")
            return queries.describe(session, [image])[0], new

    def images(self) -> list[Image]:
        with self.store.read() as session:
            published = select(ImageRow).where(ImageRow.published).order_by(ImageRow.name)
            return queries.describe(session, session.scalars(published).all())

    def image(self, name: str) -> Image:
        with self.store.read() as session:
            return queries.describe(session, [queries.published(session, name)])[0]

    def remove_image(self, name: str, *, when_unused: bool = False) -> None:
        """Remove an image, or withdraw it with ``when_unused``. Raises ImageUnknown, ImageInUse (never if unused)."""
        with self.store.write() as session:
            image = queries.published(session, name, lock=True)
            if when_unused:
                log.info("image %s is withdrawn: it goes when no host needs it any more", name)
                image.withdrawn = True
                return
            with changing_tree(session, image, self._now()) as tree:
                readers = [node.host for node in tree.members]
                awaited = [left for left in tree.departures.values() if left.awaited]
                users = (*readers, *queries.alive_hosts(session, [left.host for left in awaited]))
                if users:
                    raise ImageInUse(f"image {name} is in use by {', '.join(users)}", users)
                for origin in tree.origins:
                    tree.leave(origin.host)
                for left in awaited:
                    left.awaited = False
            image.published = False
            queries.forget_boot_set(session, image.digest)
            log.info("image %s removed", name)

    def boot_set(self, image: str) -> BootSet:
        """What VMs read first of an image; nothing if no host has told. Raises ImageUnknown."""
        with self.store.read() as session:
            row = session.get(BootSetRow, queries.published(session, image).digest)
            return BootSet.model_validate_json(f'{{"ranges": {row.ranges if row else "[]"}}}')

    def add_boot_set(self, image: str, ranges: Sequence[Sequence[int]]) -> None:
        """Merge what VMs of one host have read first into what is known. Raises ImageUnknown."""
        with self.store.write() as session:
            digest = queries.published(session, image, lock=True).digest
            row = session.get(BootSetRow, digest)
            if row is None:
                row = BootSetRow(digest=digest, ranges="[]", boots=0)
                session.add(row)
            if row.boots < bootsets.MOST_BOOTS:
                row.ranges = bootsets.text_of(bootsets.merged(json.loads(row.ranges), ranges))
                row.boots += 1

    def tree(self, image: str) -> ImageTree:
        with self.store.read() as session:
            row = queries.published(session, image)
            tree = load_tree(session, row)
            return ImageTree(
                image=row.name,
                size=row.size,
                digest=row.digest,
                revision=tree.revision,
                fanout=tree.fanout,
                root=_tree_node(tree, tree.origins[0]),
                origins=[_tree_node(tree, origin) for origin in tree.origins[1:]],
            )

    def join(self, image: str, host: str, *, moving: bool = False, agent: str = "") -> Assignment:
        """Give a host a place in the image's tree. Raises ImageUnknown, ImageWithdrawn, HostUnknown, HostTaken."""
        with self.store.write() as session:
            place = self._caller(session, host, agent).place
            row = queries.published(session, image, lock=True)
            self.deployments.note_join(session, row, host)
            with changing_tree(session, row, self._now()) as tree:
                # A host that lost its place with its lease may have VMs that need the image.
                awaited = host in tree.departures and tree.departures[host].awaited
                if row.withdrawn and host not in tree.hosts and not awaited and not moving:
                    raise ImageWithdrawn(f"image {image} is withdrawn: only hosts that have it may use it")
                tree.join(host, place)
                return self._assignment(session, row, tree, host)

    def leave(self, image: str, host: str, dropped: int = -1, *, needed: bool = False, agent: str = "") -> None:
        """Give up a host's place, if it has one. Raises HostUnknown, HostTaken, OriginNeeded.

        ``needed``: like a host whose lease ran out, the host is awaited until it reports that it has nothing of the
        image.
        """
        with self.store.write() as session:
            self._caller(session, host, agent)
            row = queries.locked_image(session, image)
            if row is None:
                return
            with changing_tree(session, row, self._now()) as tree:
                if host in tree.hosts:
                    leave_tree(tree, row, host, self.metrics, dropped)
                    tree.departures[host].awaited = needed
                elif host in tree.departures and not needed:
                    tree.departures[host].awaited = False

    def report_dead(self, image: str, reporter: str, dead: str, *, agent: str = "") -> Assignment:
        """Note that a parent does not answer; returns the reporter's assignment from now on.

        Raises ImageUnknown, NodeUnknown, HostUnknown, HostTaken.
        """
        self.metrics.reports.inc()
        with self.store.write() as session:
            self._caller(session, reporter, agent)
            row = queries.published(session, image, lock=True)
            with changing_tree(session, row, self._now()) as tree:
                if reporter not in tree.hosts:
                    raise NodeUnknown(f"host {reporter} is not in the tree of image {image}")
                tree.suspect(reporter, dead)
                return self._assignment(session, row, tree, reporter)

    def _caller(self, session: Session, host: str, agent: str) -> HostRow:
        """The host in whose name an agent calls; its lease is renewed. Raises HostUnknown, HostTaken."""
        row = queries.locked_host(session, host)
        self.leases.renew(row, agent)
        return row

    def _note_address(self, session: Session, row: HostRow, address: str | None) -> None:
        if address is None or row.address == address:
            return
        row.address = address
        for image in queries.images_of(session, row.name):
            with changing_tree(session, image, self._now()) as tree:
                if row.name in tree.hosts:
                    tree.readdress(row.name)

    def _note_place(self, session: Session, row: HostRow, place: str | None) -> None:
        """A host in another place loses its places in trees. It learns that from the answer to a heartbeat."""
        if place is None or row.place == place:
            return
        log.info("host %s is in %s now", row.name, place or "no place")
        row.place = place
        for image in queries.images_of(session, row.name):
            with changing_tree(session, image, self._now()) as tree:
                node = tree.hosts.get(row.name)
                if node is not None and node.slot > 0:
                    leave_tree(tree, image, row.name, self.metrics)
                    tree.departures[row.name].awaited = True
                elif node is not None:
                    tree.note_place(row.name, place)

    def _note_whole(self, host: str, image: str, *, whole: bool) -> None:
        with self.store.write() as session:
            row = queries.locked_image(session, image)
            if row is not None and row.published:
                with changing_tree(session, row, self._now()) as tree:
                    if host in tree.hosts:
                        tree.note_whole(host, whole=whole)

    def _hear(self, host: str, image: str, revision: int) -> list[Assignment]:
        """A host says that it follows this revision of its assignment. Returns the assignment if that is newer."""
        with self.store.write() as session:
            row = queries.locked_image(session, image)
            if row is None or not row.published:
                return []
            with changing_tree(session, row, self._now()) as tree:
                if not tree.credible(revision):
                    log.warning("image %s: host %s reports revision %d, which nobody can have", image, host, revision)
                    return []
                if not tree.hear(host, revision):
                    log.warning(
                        "image %s: host %s has revision %d, which this database has not given: it was set back to an"
                        " old copy. All hosts read from the origins until they have confirmed new parents",
                        image,
                        host,
                        revision,
                    )
                node = tree.hosts.get(host)
                return [self._assignment(session, row, tree, host)] if node and node.revision > revision else []

    def _assignment(self, session: Session, image: ImageRow, tree: Tree, host: str) -> Assignment:
        """What a host is told now."""
        node = tree.tell(host)
        parents = tree.parents(node)
        query = select(HostRow.name, HostRow.address).where(HostRow.name.in_(parents))
        addresses = dict(session.execute(query).all())
        secret = partial(edge_secret, self.store.edge_key, image.name)
        serving = partial(serving_key, self.store.edge_key, image.name)
        return Assignment(
            image=image.name,
            size=image.size,
            digest=image.digest,
            slot=node.slot,
            revision=node.revision,
            state=node.state,
            parents=[
                Parent(
                    host=name,
                    address=addresses[name],
                    secret=secret(name, node.host),
                    ticket=ticket(serving(name), node.host, node.revision),
                    far=tree.hosts[name].place != node.place,
                )
                for name in parents
            ],
            children=[Child(host=name, secret=secret(node.host, name)) for name in tree.children(node)],
            serving_key=serving(node.host),
        )


def _words(methods: Sequence[str]) -> str:
    return " ".join(sorted(set(methods)))


def _tree_node(tree: Tree, node: Node, depth: int = 0) -> TreeNode:
    children = [_tree_node(tree, below, depth + 1) for below in tree.below(node)]
    return TreeNode(**vars(node), depth=depth, children=children)
