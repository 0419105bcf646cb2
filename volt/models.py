"""What goes over Volt's API: the one description that the server validates with and the client returns.

From 0.3 on agent and Volt may be one minor version apart, both ways: fields that one of them does not know are ignored,
in requests and in answers, and a state that a client does not know is ``unknown`` to it. A new field has a default.

Sizes are bytes, times are UTC, durations are seconds. Volt compares digests and hands on addresses, and interprets
neither: their kinds and schemes are those of the hosts' drivers.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from volt.deploymodels import Method, TransferReport, TransferTask
from volt.fields import Address, Answer, Count, Digest, Name, Request, Size, State, Where


class HostState(State):
    """``lost``: its lease ran out and it left all trees. Its next call makes it ``alive``.

    ``unknown``: what a client reads for a state of a later version. Volt never sends it.
    """

    ALIVE = "alive"
    LOST = "lost"
    UNKNOWN = "unknown"


class NodeState(State):
    """How far a host's place in a tree is confirmed by that host, and so whether others may read from it.

    ``joining`` (may be read from): new, not confirmed yet. ``ready`` (may be read from): confirmed.
    ``moving``: got another slot and has not confirmed that it reads only from its new parents.
    ``returning``: was in the tree before, and some node may still read from it by an old list.
    ``suspect``: a child reported it dead. ``lost``: an origin whose lease ran out.
    ``unknown``: what a client reads for a state of a later version. Volt never sends it.
    """

    JOINING = "joining"
    READY = "ready"
    MOVING = "moving"
    RETURNING = "returning"
    SUSPECT = "suspect"
    LOST = "lost"
    UNKNOWN = "unknown"


class HostRequest(Request):
    """A host registers, or what it says of itself has changed; what it does not say stays as it is.

    ``methods``: see ``HeartbeatRequest``.
    """

    address: Address
    place: Where | None = None
    methods: list[Method] | None = Field(default=None, max_length=32)


class PublishRequest(Request):
    """``origin`` has the whole image and serves it from its own copy.

    ``parent``: the image that this one was made of, if the origin knows that. Nothing depends on it.
    """

    name: Name
    size: Size
    digest: Digest
    origin: Name
    parent: Name | None = None


class JoinRequest(Request):
    """A host asks for a place in an image's tree. ``moving``: for a disk of the image that another host has had."""

    host: Name
    moving: bool = False


class DeadParentReport(Request):
    """``reporter`` could not read from ``dead``."""

    reporter: Name
    dead: Name


class NodeReport(Request):
    """What a host reports about one of its images.

    ``revision``: the newest assignment that the host follows: it reads from parents of no older one.
    ``fetched_bytes``: read from parents so far. ``parent``: the host that it reads from now. ``whole``: the host keeps
    all of the image, as an administrator has asked for; others prefer to read from such a host. ``sent_bytes``: what
    other hosts have read there, since the host began to serve the image.
    """

    image: Name
    revision: Count
    fetched_bytes: Count = 0
    parent: Name | None = None
    whole: bool = False
    sent_bytes: Count = 0


class HeartbeatRequest(Request):
    """``nodes``: all images that a host has a stack for. ``kept``: digests of retained data without a stack.

    ``needed``: further images that the host may need: it has records of them that it cannot use now.
    ``address``, ``place``, ``methods``: the host's own, which replace those that Volt has; the last are those by which
    it can send and receive whole images. ``transfers``: how far the host is in the deployments that it was told of;
    null of an agent that knows nothing of deployments.
    """

    nodes: list[NodeReport] = Field(default_factory=list, max_length=10000)
    kept: list[Digest] = Field(default_factory=list, max_length=10000)
    needed: list[Name] = Field(default_factory=list, max_length=10000)
    address: Address | None = None
    place: Where | None = None
    transfers: list[TransferReport] | None = Field(default=None, max_length=1000)
    methods: list[Method] = Field(default_factory=list, max_length=32)


class BootSet(BaseModel):
    """What VMs read of an image while they boot. ``ranges``: where each begins and ends, in the order of the reads.

    All are multiples of 64 KiB. What several hosts have told is merged, up to a limit.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    ranges: list[Annotated[list[Count], Field(min_length=2, max_length=2)]] = Field(max_length=16384)


class Host(Answer):
    """A registered host. ``place``: its site and rack, ``SITE/RACK``; empty if it has told none.

    ``whole``: the images of which the host has all, as an origin or since it was asked to keep all of them.
    """

    name: str
    address: str
    place: str = ""
    state: HostState
    last_seen: datetime
    whole: list[str] = Field(default_factory=list)


class HostList(Answer):
    """All registered hosts, by name."""

    hosts: list[Host]


class Parent(Answer):
    """A host to read from. ``secret``: known to both hosts and no third, the same as in the parent's ``Child``.

    ``ticket``: a secret as well, of this assignment's revision. The parent can compute it (``Assignment.serving_key``).
    ``far``: in another place. A host reads there only when no parent in its own place answers.
    """

    host: str
    address: str
    secret: str = Field(repr=False)
    ticket: str = Field(default="", repr=False)
    far: bool = False


class Child(Answer):
    """A host that may read. ``secret``: known to both hosts and no third, the same as in the child's ``Parent``."""

    host: str
    secret: str = Field(repr=False)


class Assignment(Answer):
    """A host's place in an image's tree, for this host only.

    ``parents``: in order of preference, empty only for an origin. ``children``: hosts that may read from this one.
    ``revision`` grows with every change: follow the highest one seen and never go back. Origins have slots 0, -1, -2,
    …; every parent's slot is smaller than that of its child. The secret of a parent and a child never changes.
    ``serving_key``: by which the host knows children that Volt names only later (volt/edgesecrets.py).
    """

    image: str
    size: int
    digest: str
    slot: int
    revision: int
    state: NodeState
    parents: list[Parent]
    children: list[Child]
    serving_key: str = Field(default="", repr=False)


class HeartbeatAnswer(Answer):
    """``assignments``: those newer than the host reported, also of images that it did not report and should leave.

    ``absent``: reported images in whose trees the host has no place: it has to join again. ``withdrawn``: reported
    images to detach as soon as nothing on the host and none of its children needs them. An origin is told when no other
    host has the image or may come back for it. ``discard``: digests of ``kept`` to delete: their images were withdrawn.
    ``transfers``: what the host has to do in deployments.
    """

    interval_s: float
    lease_s: float
    assignments: list[Assignment]
    absent: list[str]
    withdrawn: list[str] = Field(default_factory=list)
    discard: list[str] = Field(default_factory=list)
    transfers: list[TransferTask] = Field(default_factory=list)


class Image(Answer):
    """A published image. ``nodes`` counts the hosts in its tree besides the origins.

    ``withdrawn``: no further host gets the image, and it goes when only its origins have it. ``parent``: the image that
    this one was made of, as its publisher said. It may be gone.
    """

    name: str
    size: int
    digest: str
    origins: list[str]
    nodes: int
    revision: int
    withdrawn: bool = False
    parent: str | None = None


class ImageList(Answer):
    """All published images, by name."""

    images: list[Image]


class TreeNode(Answer):
    """A host in an image's tree. ``children``: its primary children. ``parent``: the host that it reads from now.

    ``whole``: the host keeps all of the image, and comes first where it is a parent. ``place``: where the host was when
    it joined. Slots are those of a place.
    """

    host: str
    place: str = ""
    slot: int
    state: NodeState
    depth: int
    revision: int
    confirmed: int
    fetched_bytes: int
    sent_bytes: int = 0
    parent: str | None
    children: list[TreeNode]
    whole: bool = False


class ImageTree(Answer):
    """An image's tree: ``root`` is the origin in slot 0, ``origins`` are the further ones."""

    image: str
    size: int
    digest: str
    revision: int
    fanout: int
    root: TreeNode
    origins: list[TreeNode]


class ProblemDocument(BaseModel):
    """An error (RFC 9457). ``detail``: what is wrong, for people; ``hosts``: the hosts concerned, if any."""

    type: str
    title: str
    status: int
    detail: str
    hosts: list[str] = Field(default_factory=list)


class Health(Answer):
    """``status`` is ``ok`` when the store answers."""

    status: str


def summary(error: ValidationError) -> str:
    """What is wrong with a request or an answer, in one line, without repeating the values."""
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'value'}: {e['msg']}" for e in error.errors())
