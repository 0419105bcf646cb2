"""Volt in memory, as one host sees it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, cast

from drivers import base
from tests.doubles.drivers import Moment, unnoticed
from virtman.voltlink import VoltLink
from volt import errors
from volt.bootsets import merged
from volt.client import (
    Assignment,
    BootSet,
    Child,
    HeartbeatAnswer,
    Host,
    HostState,
    Image,
    ImageTree,
    NodeReport,
    NodeState,
    Parent,
    TransferReport,
    TransferTask,
    TreeNode,
    VoltClient,
)

HERE = "here"
INTERVAL = 3600.0
"""Seconds between heartbeats: more than any test waits, so that none passes by a beat that nobody asked for."""
SERVE = "unix:///run/other/serve"
SECRET = "whispered"
"""In all secrets and in nothing else."""


class VoltDouble:
    """Images, and the one host's places in their trees. Raises what the real one answers (``volt.errors``).

    tests/unit/volt/test_contract.py holds it to what the real one does. ``nodes`` of an image counts other hosts here.
    """

    def __init__(self) -> None:
        self.moment: Moment = unnoticed
        self.down = False
        self.hosts: dict[str, str] = {}
        self.agents: dict[str, str] = {}
        """By host, the agent that has its name."""
        self.images: dict[str, Image] = {}
        self.places: dict[str, Assignment] = {}
        """Where the host reads an image from the tree, or is its origin (slot 0)."""
        self.forgotten: set[str] = set()
        """Images whose place the host lost with its lease, or left though it may need them."""
        self.dropped: dict[str, int] = {}
        """The revision up to which the host that left an image had dropped its parents."""
        self.reported: list[tuple[str, str]] = []
        self.needed: list[str] = []
        self.beats: list[list[NodeReport]] = []
        self.withdrawn: set[str] = set()
        """Digests under which an image was withdrawn."""
        self.boot_sets: dict[str, list[list[int]]] = {}
        """By digest."""
        self.tasks: list[TransferTask] = []
        """What the host is told to do in deployments."""
        self.transfers: list[TransferReport] = []
        """How far it was in them at the last heartbeat."""
        self.methods: list[str] = []
        """By which it can get whole images, as it said at the last heartbeat."""
        self.locations: dict[str, str] = {}
        """By host, its site and rack."""
        self._revision = 0
        self._parents: dict[str, list[str]] = {}

    def offer(self, name: str, size: int = 1 << 20, digest: str = "") -> base.Image:
        """Another host publishes an image."""
        image = base.Image(name, size, digest or digest_of(name))
        self._list(image, "other")
        return image

    def assign(self, image: str, parents: list[str], children: list[str] | None = None) -> Assignment:
        """Change the host's place."""
        self._parents[image] = parents
        return self._assign(image, slot=3, parents=parents, children=children or [])

    def read_by_others(self, image: str, hosts: int = 1) -> None:
        """Other hosts have the image."""
        self.images[image] = self.images[image].model_copy(update={"nodes": hosts})

    def forget(self, image: str) -> None:
        """The host's lease ran out, and with it its place."""
        if self.places.pop(image, None) is not None:
            self.forgotten.add(image)

    def lose_the_answer(self, what: str) -> None:
        """A ``moment``: Volt takes what is published and goes before it can say so."""
        if what == "after volt.publish":
            self.down = True

    def register(
        self, host: str, address: str, place: str | None = None, methods: Sequence[str] | None = None, *,
        agent: str = "",
    ) -> Host:  # fmt: skip
        self._answer("register")
        self.hosts.setdefault(host, address)
        self._check(host, agent)
        self.hosts[host], self.agents[host] = address, agent
        self._note_place(host, place)
        self.methods = list(methods or self.methods)
        return Host(
            name=host, address=address, place=self.locations[host], state=HostState.ALIVE,
            last_seen=datetime(2026, 1, 1, tzinfo=UTC),
        )  # fmt: skip

    def _note_place(self, host: str, place: str | None) -> None:
        before = self.locations.setdefault(host, "")
        if place is not None and place != before:
            self.locations[host] = place
            for image in [name for name, assignment in self.places.items() if assignment.slot > 0]:
                self.forget(image)

    def heartbeat(
        self,
        host: str,
        nodes: Sequence[NodeReport],
        kept: Sequence[str] = (),
        needed: Sequence[str] = (),
        address: str | None = None,
        place: str | None = None,
        transfers: Sequence[TransferReport] = (),
        methods: Sequence[str] = (),
        *,
        agent: str = "",
    ) -> HeartbeatAnswer:
        self._answer("heartbeat")
        self._check(host, agent)
        if address is not None:
            self.hosts[host] = address
        self._note_place(host, place)
        self.beats.append(list(nodes))
        self.transfers, self.methods = list(transfers), list(methods)
        self.needed = list(needed)
        wanted = {image.digest for image in self.images.values() if not image.withdrawn}
        reported = {node.image: node.revision for node in nodes}
        return HeartbeatAnswer(
            interval_s=INTERVAL,
            lease_s=3 * INTERVAL,
            assignments=[p for p in self.places.values() if p.revision > reported.get(p.image, -1)],
            absent=sorted(name for name in reported if name not in self.places),
            withdrawn=sorted(name for name in reported if self._to_let_go(name)),
            discard=sorted((self.withdrawn & set(kept)) - wanted),
            transfers=self.tasks,
        )

    def publish(
        self, name: str, size: int, digest: str, origin: str, parent: str | None = None, *, agent: str = ""
    ) -> tuple[Image, bool]:
        self._answer("publish")
        self._check(origin, agent)
        image, host = base.Image(name, size, digest), origin
        there = self.images.get(image.name)
        if there is not None and (there.digest, there.size) != (image.digest, image.size):
            how = "being withdrawn, and not gone yet," if there.withdrawn else "published"
            raise errors.ImageConflict(f"image {image.name} is {how} with digest {there.digest}, size {there.size}")
        if self._reads(image.name):
            raise errors.HostHasNode(f"host {host} reads image {image.name} from the tree: leave first")
        origins = there.origins if there is not None else []
        if host not in origins or image.name not in self.places:
            self._list(image, *[origin for origin in origins if origin != host], host)
            self._assign(image.name, slot=1 - len(self.images[image.name].origins), parents=[], children=[])
        parent = parent or (there.parent if there is not None else None)
        self.images[name] = self.images[name].model_copy(update={"withdrawn": False, "parent": parent})
        self.moment("after volt.publish")
        return self._shown(image.name), there is None

    def join(self, image: str, host: str = HERE, *, moving: bool = False, agent: str = "") -> Assignment:
        self._answer("join")
        self._check(host, agent)
        if self._known(image).withdrawn and not moving and image not in self.places and image not in self.forgotten:
            raise errors.ImageWithdrawn(f"image {image} is withdrawn: only hosts that have it may use it")
        if (place := self.places.get(image)) is not None:
            parents, children = ([each.host for each in hosts] for hosts in (place.parents, place.children))
            self._assign(image, place.slot, parents, children)
        else:
            self._assign(image, slot=1, parents=self._parents.get(image, ["other"]), children=[])
        self.moment("after volt.join")
        return self.places[image]

    def leave(self, image: str, host: str, dropped: int = -1, *, needed: bool = False, agent: str = "") -> None:
        self._answer("leave")
        self._check(host, agent)
        if image in self.images:
            self.dropped[image] = dropped
            origins = self.images[image].origins
            if origins == [host]:
                raise errors.OriginNeeded(f"host {host} is the last origin of image {image}: remove the image instead")
            left = [origin for origin in origins if origin != host]
            self.images[image] = self.images[image].model_copy(update={"origins": left})
            if self.places.pop(image, None) is not None and needed:
                self.forgotten.add(image)
        self.moment("after volt.leave")

    def remove_image(self, image: str, *, when_unused: bool = False) -> None:
        self._answer("remove")
        users = ("h7",) if self._known(image).nodes else (HERE,) if self._reads(image) else ()
        if when_unused:
            self.withdrawn.add(self.images[image].digest)
            self._mark(image, withdrawn=True)
            return
        if users:
            raise errors.ImageInUse(f"image {image} is in use by {', '.join(users)}", users)
        del self.images[image]
        self.places.pop(image, None)

    def report_dead(self, image: str, reporter: str, dead: str, *, agent: str = "") -> Assignment:
        self._answer("report")
        self._check(reporter, agent)
        self._known(image)
        self.reported.append((image, dead))
        place = self.places.get(image)
        if place is None:
            raise errors.NodeUnknown(f"host {HERE} is not in the tree of image {image}")
        parents = [parent.host for parent in place.parents]
        if dead not in parents:
            return place
        left = [host for host in parents if host != dead]
        children = [child.host for child in place.children]
        return self._assign(image, place.slot, parents=left or ["other"], children=children)

    def boot_set(self, image: str) -> BootSet:
        self._answer("boot_set")
        return BootSet(ranges=self.boot_sets.get(self._known(image).digest, []))

    def add_boot_set(self, image: str, ranges: Sequence[Sequence[int]]) -> None:
        self._answer("add_boot_set")
        digest = self._known(image).digest
        self.boot_sets[digest] = merged(self.boot_sets.get(digest, []), ranges)
        self.moment("after volt.add_boot_set")

    def image(self, name: str) -> Image:
        self._answer("image")
        self._known(name)
        return self._shown(name)

    def listing(self) -> list[Image]:
        self._answer("images")
        found = [self._shown(name) for name in sorted(self.images)]
        self.moment("after volt.images")
        return found

    def tree(self, image: str) -> ImageTree:
        self._answer("tree")
        published = self._known(image)
        place = self.places.get(image)
        root = TreeNode(
            host=published.origins[0], slot=0, state=NodeState.READY, depth=0, revision=1, confirmed=1, fetched_bytes=0,
            parent=None, children=[_tree_node(place)] if place is not None and place.parents else [],
        )  # fmt: skip
        return ImageTree(
            image=image, size=published.size, digest=published.digest, revision=1, fanout=2, root=root, origins=[]
        )

    def _check(self, host: str, agent: str) -> None:
        if host not in self.hosts:
            raise errors.HostUnknown(f"host {host} is not registered")
        if self.agents.get(host, "") not in ("", agent):
            raise errors.HostTaken(f"another agent runs under the host name {host}, at {self.hosts[host]}")

    def _known(self, image: str) -> Image:
        if image not in self.images:
            raise errors.ImageUnknown(f"no image {image} is published")
        return self.images[image]

    def _mark(self, image: str, *, withdrawn: bool) -> None:
        self.images[image] = self.images[image].model_copy(update={"withdrawn": withdrawn})

    def _to_let_go(self, image: str) -> bool:
        """Whether the host need not keep the image for anybody: as the origin of it, if no other host has it."""
        if image not in self.places or not self.images[image].withdrawn:
            return False
        return self._reads(image) or not self.images[image].nodes

    def _reads(self, image: str) -> bool:
        """Whether the host reads the image from the tree."""
        return image in self.places and bool(self.places[image].parents)

    def _shown(self, name: str) -> Image:
        image = self.images[name]
        return image.model_copy(update={"nodes": image.nodes + self._reads(name)})

    def _answer(self, call: str) -> None:
        self.moment(f"before volt.{call}")
        if self.down:
            raise errors.StoreDown("the store does not answer")

    def _list(self, image: base.Image, *origins: str) -> None:
        self.images[image.name] = Image(
            name=image.name, size=image.size, digest=image.digest, origins=list(origins), nodes=0, revision=1
        )

    def _assign(self, image: str, slot: int, parents: list[str], children: list[str]) -> Assignment:
        self._revision += 1
        published = self.images[image]
        self.places[image] = Assignment(
            image=image, size=published.size, digest=published.digest, slot=slot, revision=self._revision,
            state=NodeState.JOINING,
            parents=[
                Parent(host=host, address=SERVE, secret=(known := secret_of(image, host)),
                       ticket=f"{known} at {self._revision}", far=self.locations.get(HERE, "") != "")
                for host in parents
            ],
            children=[Child(host=host, secret=secret_of(image, host)) for host in children],
            serving_key=secret_of(image, HERE),
        )  # fmt: skip
        return self.places[image]


def _tree_node(place: Assignment) -> TreeNode:
    return TreeNode(
        host=HERE, slot=place.slot, state=place.state, depth=1, revision=place.revision, confirmed=place.revision,
        fetched_bytes=0, parent=None, children=[],
    )  # fmt: skip


class Calls:
    """The double with the calls of VoltClient and of Coordinator: there ``images`` is one of them."""

    def __init__(self, volt: VoltDouble) -> None:
        self._volt = volt

    def images(self) -> list[Image]:
        return self._volt.listing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._volt, name)


def link_to(volt: VoltDouble, host: str = HERE) -> VoltLink:
    """The link of a host, the real one, to the double, at which the host is registered."""
    volt.hosts.setdefault(host, SERVE)
    return VoltLink(cast(VoltClient, Calls(volt)), host, SERVE)


def digest_of(name: str) -> str:
    """A digest that differs by name."""
    return "sha256:" + (name.encode().hex() * 64)[:64]


def secret_of(image: str, other: str) -> str:
    """What the one host and another one share for an image."""
    return f"{SECRET} of {other} for {image}"


def parent(host: str, image: str = "debian") -> base.Parent:
    """A parent as drivers are told of it."""
    return base.Parent(host, SERVE, secret_of(image, host))


def child(host: str, image: str = "debian") -> base.Child:
    """A child as drivers are told of it."""
    return base.Child(host, secret_of(image, host))
