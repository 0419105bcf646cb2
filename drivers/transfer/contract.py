"""The contract between the agent and the methods by which whole images travel to many hosts at once.

A method only brings chunks sooner. What it brings goes through ``ImageSource.put``, which compares each chunk with the
image's manifest; what it does not bring, the tree of hosts brings afterwards. So a method needs no way to go on after
a failure: it ends, and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from drivers.base import Image, Place, Range, Taken
from drivers.needs import Needs


@dataclass(frozen=True)
class Terms:
    """What all hosts of a transfer know when it begins.

    ``number``: no other transfer that runs in the cluster has it. ``ranges``: what some receiver lacks, in order; whole
    chunks. ``sender`` and ``receivers``: their contacts, as ``offer`` and ``expect`` returned them; those of one rack
    are together. ``limit``: bytes a second that each host receives at most. ``encrypt``: nobody else may read it.
    """

    number: int
    ranges: Sequence[Range]
    sender: str
    receivers: Sequence[str]
    limit: int | None = None
    encrypt: bool = False


class Content(Protocol):
    """What a method uses of an ``ImageSource``, which describes the calls."""

    def lacking(self, image: Image) -> Sequence[Range]: ...

    def put(self, image: Image, ranges: Sequence[Range], file: int) -> Taken: ...

    def get(self, image: Image, ranges: Sequence[Range], file: int) -> None: ...


class Transfer(Protocol):
    """One host's part in one transfer. All calls but ``stop`` and ``sent_bytes`` come from one thread.

    Every method raises DriverError. A method that raises or returns has ended all its programs and deleted its files,
    except what goes on until ``stop``.
    """

    needs: ClassVar[Needs]
    """Of the machine, for this method."""
    encrypts: ClassVar[bool]
    """Whether it can do so that nobody else may read it."""
    multicasts: ClassVar[bool]
    """Whether one packet is for all receivers. What that can carry is found out while they get ready (probe.py)."""

    def __init__(self, place: Place, source: Content, image: Image) -> None: ...

    def offer(self) -> str:
        """Get ready to send. Returns what receivers have to know: this host's contact, at most 500 characters."""

    def expect(self) -> str:
        """Get ready to receive. Returns this host's contact, as ``offer``."""

    def send(self, terms: Terms) -> None:
        """Send what the terms say. Returns when all is sent, or after ``stop``."""

    def receive(self, terms: Terms) -> None:
        """Receive, and put into the source. Returns when no more comes, or after ``stop``.

        A method whose receivers send, too, goes on with that until ``stop``.
        """

    def stop(self) -> None:
        """End it, from any thread, also before it began or after it ended. Nothing is left over."""

    @property
    def sent_bytes(self) -> int:
        """What this host has sent to others, as far as the method knows."""
