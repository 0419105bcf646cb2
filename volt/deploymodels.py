"""What goes over Volt's API of deployments: whole images on their way to many hosts."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from volt.fields import MAX_INTEGER, Answer, Count, Name, Request, State, Where
from volt.spans import MOST_RANGES

Method = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]{0,31}$", description="How an image travels")]


class TransferState(State):
    """How far a host is in a deployment.

    ``waiting``: not heard of yet. ``ready``: has the image's stack, and waits for its turn. ``filling``: reads what is
    missing. ``whole``: all of the image is there, and stays. ``failed``: ``error`` says why. ``lost``: its lease ran
    out first. ``cancelled``: the deployment was.

    ``unknown``: what a client reads for a state of a later version. Volt never sends it.
    """

    WAITING = "waiting"
    READY = "ready"
    FILLING = "filling"
    WHOLE = "whole"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


UNDER_WAY = (TransferState.WAITING, TransferState.READY, TransferState.FILLING)


Span = Annotated[list[Count], Field(min_length=2, max_length=2, description="Where a range begins and ends, in bytes")]


class TransferReport(Request):
    """How far a host is in a deployment: ``done`` of ``total`` bytes are there, and it has ``sent`` so many.

    A host that is ready for a method by which hosts begin together says who it is for that method (``contact``), and
    what it ``lacks``. ``attempt`` is new each time that it got ready: what it had agreed on before does not hold any
    more. ``sends``: all of this is about what the host sends to others, and not about what it gets. ``method``: that of
    the task which the host heard last.

    What a try of the network has shown: ``rate``, bytes a second from the tree, and ``delay``, seconds until the first
    came. ``loss``: the part of the sender's multicast packets that did not come, and ``link``, bytes a second that
    could; null if none came.
    """

    deployment: Count
    sends: bool = False
    method: Method | None = None
    attempt: str = Field(default="", max_length=32)
    contact: str = Field(default="", max_length=500)
    lacks: list[Span] = Field(default_factory=list, max_length=MOST_RANGES)
    sent: Count = 0
    rate: float | None = Field(default=None, ge=0)
    delay: float | None = Field(default=None, ge=0)
    link: float | None = Field(default=None, ge=0)
    loss: float | None = Field(default=None, ge=0, le=1)
    state: TransferState = Field(strict=False)
    done: Count = 0
    total: Count = 0
    error: str = Field(default="", max_length=1000)


class TransferTerms(Answer):
    """What hosts that begin together have agreed on.

    ``number``: of this leg of the deployment. ``ranges``: what travels. ``sender``, ``receivers``: their contacts, one
    rack after the other. ``attempt``: the one of the host that is told so, with which it is a part of this.
    """

    number: int
    ranges: list[list[int]]
    sender: str
    receivers: list[str]
    attempt: str


class TransferTask(Answer):
    """What a host has to do in a deployment, as long as the answers to its heartbeats say so.

    It attaches the image, and keeps all of it until ``keep_until``, in seconds since 1970. It begins to read when
    ``go`` says so. ``source``: the host that it reads from before all others, if the method wants that. ``terms``: of
    a method by which hosts begin together, until the host says that it moves bytes. ``sends``: it has the image, and
    sends it. ``limit``: bytes a second. ``cancelled``: it need not keep the image, unless all of the image is there
    already.
    """

    deployment: int
    image: str
    digest: str
    method: str
    keep_until: float
    go: bool
    source: str = ""
    sends: bool = False
    terms: TransferTerms | None = None
    encrypt: bool = False
    cancelled: bool = False
    limit: int | None = None


class DeploymentRequest(Request):
    """Bring a whole image to hosts: to those named, to all in a place, or to all. One of the three.

    ``encrypt``: true asks for encryption, false does without; null: as the method does. ``limit``: bytes a second that
    each host receives at most. ``keep_s``: seconds for which the image then stays. ``parallel``: hosts at a time, where
    hosts have turns.
    """

    image: Name
    hosts: list[Name] | None = Field(default=None, min_length=1, max_length=100000)
    place: Where | None = Field(default=None, min_length=1)
    everywhere: bool = False
    method: Method = "auto"
    encrypt: bool | None = None
    limit: int | None = Field(default=None, ge=1, le=MAX_INTEGER)
    keep_s: int = Field(default=30 * 86400, ge=60, le=MAX_INTEGER)
    parallel: int = Field(default=1, ge=1, le=100000)


class DeploymentHost(Answer):
    """A host of a deployment. The fields are those of ``TransferReport``; ``seconds`` since it was asked for.

    ``sent``: bytes of the image that other hosts have got from this one, since it began to serve the image.
    """

    host: str
    place: str = ""
    state: TransferState
    done: int = 0
    total: int = 0
    sent: int = 0
    error: str = ""
    seconds: float | None = None


class DeploymentLeg(Answer):
    """Hosts of a deployment that get the image together: who sends, and how many bytes that host has ``sent``.

    ``receivers``: how many hosts; all others take the tree. ``begun``: seconds after the deployment was asked for; null
    if it did not begin.
    """

    source: str
    sent: int
    receivers: int
    begun: float | None
    ended: bool


class Deployment(Answer):
    """A whole image on its way to hosts. ``asked``: the method that was asked for. ``method``: the one that was chosen,
    with ``predicted`` seconds of each that could be, and ``why``; ``auto`` until that is known.

    ``ended``: no host is under way any more. ``cancelled``: somebody ended it. ``seconds`` that it has taken.
    """

    id: int
    image: str
    size: int
    digest: str
    asked: str
    method: str
    encrypt: bool | None
    limit: int | None = None
    keep_s: int
    predicted: dict[str, float] = Field(default_factory=dict)
    why: str = ""
    created: datetime
    seconds: float
    ended: bool
    cancelled: bool
    hosts: list[DeploymentHost] = Field(default_factory=list)
    legs: list[DeploymentLeg] = Field(default_factory=list)


class DeploymentList(Answer):
    """Deployments, the newest first, without their hosts."""

    deployments: list[Deployment]
