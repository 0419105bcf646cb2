"""Volt in memory, as one host sees it, and that host's seat at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from drivers import base
from tests.doubles.drivers import Moment, unnoticed
from virtman.errors import CoordinatorDown
from virtman.voltlink import ERRORS
from volt import errors
from volt.client import Assignment, Child, HeartbeatAnswer, Image, ImageTree, NodeReport, NodeState, Parent, TreeNode

T = TypeVar("T")

INTERVAL = 30.0
SERVE = "unix:///run/other/serve"
SECRET = "whispered"
"""In all secrets and in nothing else."""


class VoltDouble:
    """Images, and the one host's places in their trees. Raises what the real one answers (``volt.errors``)."""

    def __init__(self) -> None:
        self.moment: Moment = unnoticed
        self.down = False
        self.hosts: dict[str, str] = {}
        self.images: dict[str, Image] = {}
        self.places: dict[str, Assignment] = {}
        """Where the host reads an image from the tree, or is its origin (slot 0)."""
        self.dropped: dict[str, int] = {}
        """The revision up to which the host that left an image had dropped its parents."""
        self.reported: list[tuple[str, str]] = []
        self.beats: list[list[NodeReport]] = []
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

    def forget(self, image: str) -> None:
        """The host's lease ran out, and with it its place."""
        self.places.pop(image, None)

    def register(self, host: str, address: str) -> None:
        self._answer("register")
        self.hosts[host] = address

    def heartbeat(self, nodes: list[NodeReport]) -> HeartbeatAnswer:
        self._answer("heartbeat")
        self.beats.append(nodes)
        reported = {node.image: node.revision for node in nodes}
        return HeartbeatAnswer(
            interval_s=INTERVAL,
            lease_s=3 * INTERVAL,
            assignments=[p for p in self.places.values() if p.revision > reported.get(p.image, -1)],
            absent=sorted(name for name in reported if name not in self.places),
        )

    def publish(self, image: base.Image, host: str) -> Image:
        self._answer("publish")
        there = self.images.get(image.name)
        if there is not None and (there.digest, there.size) != (image.digest, image.size):
            raise errors.ImageConflict(f"image {image.name!r} exists with other content")
        if image.name in self.places and self.places[image.name].parents:
            raise errors.HostHasNode(f"host {host!r} reads {image.name!r} from the tree")
        self._list(image, host)
        self._assign(image.name, slot=0, parents=[], children=[])
        self.moment("after volt.publish")
        return self.images[image.name]

    def join(self, image: str) -> Assignment:
        self._answer("join")
        self._known(image)
        if image not in self.places:
            self._assign(image, slot=1, parents=self._parents.get(image, ["other"]), children=[])
        self.moment("after volt.join")
        return self.places[image]

    def leave(self, image: str, host: str, dropped: int = -1) -> None:
        self._answer("leave")
        self._known(image)
        self.dropped[image] = dropped
        if self.images[image].origins == [host]:
            raise errors.OriginNeeded(f"host {host!r} is the last origin of {image!r}")
        self.places.pop(image, None)
        self.moment("after volt.leave")

    def remove_image(self, image: str) -> None:
        self._answer("remove")
        self._known(image)
        del self.images[image]
        self.places.pop(image, None)

    def report(self, image: str, dead: str) -> Assignment:
        self._answer("report")
        self._known(image)
        self.reported.append((image, dead))
        left = [parent.host for parent in self.places[image].parents if parent.host != dead]
        return self._assign(image, slot=1, parents=left or ["other"], children=[])

    def listing(self) -> list[Image]:
        self._answer("images")
        return list(self.images.values())

    def tree(self, image: str) -> ImageTree:
        self._answer("tree")
        published = self._known(image)
        root = TreeNode(
            host=published.origins[0], slot=0, state=NodeState.READY, depth=0, revision=1, confirmed=1, fetched_bytes=0,
            parent=None, children=[],
        )  # fmt: skip
        return ImageTree(
            image=image, size=published.size, digest=published.digest, revision=1, fanout=2, root=root, origins=[]
        )

    def _known(self, image: str) -> Image:
        if image not in self.images:
            raise errors.ImageUnknown(f"no image {image!r} is published")
        return self.images[image]

    def _answer(self, call: str) -> None:
        self.moment(f"before volt.{call}")
        if self.down:
            raise errors.StoreDown("the store does not answer")

    def _list(self, image: base.Image, origin: str) -> None:
        self.images[image.name] = Image(
            name=image.name, size=image.size, digest=image.digest, origins=[origin], nodes=0, revision=1
        )

    def _assign(self, image: str, slot: int, parents: list[str], children: list[str]) -> Assignment:
        self._revision += 1
        published = self.images[image]
        self.places[image] = Assignment(
            image=image, size=published.size, digest=published.digest, slot=slot, revision=self._revision,
            state=NodeState.JOINING,
            parents=[Parent(host=host, address=SERVE, secret=secret_of(image, host)) for host in parents],
            children=[Child(host=host, secret=secret_of(image, host)) for host in children],
        )  # fmt: skip
        return self.places[image]


class Seat:
    """What a stack needs of Volt, with the agent's errors."""

    def __init__(self, volt: VoltDouble, host: str = "here") -> None:
        self._volt = volt
        self._host = host

    def join(self, image: str) -> Assignment:
        return _ours(lambda: self._volt.join(image))

    def leave(self, image: str, dropped: int = -1) -> None:
        if image in self._volt.images or self._volt.down:
            _ours(lambda: self._leave(image, dropped))

    def _leave(self, image: str, dropped: int) -> None:
        try:
            self._volt.leave(image, self._host, dropped)
        except errors.OriginNeeded:
            self._volt.remove_image(image)

    def publish(self, image: base.Image) -> Assignment:
        _ours(lambda: self._volt.publish(image, self._host))
        return self.join(image.name)

    def report(self, image: str, dead: str) -> Assignment:
        return _ours(lambda: self._volt.report(image, dead))


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


def _ours(call: Callable[[], T]) -> T:
    try:
        return call()
    except errors.VoltError as error:
        raise ERRORS.get(type(error), CoordinatorDown)(f"Volt: {error}") from error
