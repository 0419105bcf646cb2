"""What a network between hosts can do, found out while the tree brings the image: the method ``auto``.

The host that would send multicasts to those that would receive: first *trains*, which are many full packets at once,
and show what a link carries; then small numbered packets, which show what is lost. What the tree brings shows the rest.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import median

from drivers.base import Image, Place
from drivers.door import door
from drivers.host.watch import Watch
from drivers.needs import Needs
from drivers.transfer.contract import Content, Terms

GROUP, PORT = "239.255.86.77", 20478
"""A multicast group for local use (RFC 2365, 6.1), and a port that the kernel gives to nobody by itself."""
INTERVAL = 0.01
"""Seconds between two small packets."""

TRAIN, TRAIN_INTERVAL, PAYLOAD = 256, 0.5, 1400
"""Packets of a train, seconds between two trains, and bytes of a packet: tunnels have room for so many.

A train is longer than what a shaper lets pass at once and the queue of a small switch together.
"""
HEADERS = 42
"""Bytes of Ethernet, IP and UDP."""
BUFFER = 1 << 20
"""Bytes of packets that wait for the receiver. Who is not root may get fewer (socket(7), rmem_max)."""
SHORTEST_TRAIN = 24
"""Packets without which a train says nothing."""
TRAINS, LISTENS = 3, 1.5
"""Trains after which a link is known, for one may have met a busy host; and seconds of waiting for them, at most."""

LOOK = 0.2
"""Seconds between two looks at what the tree has brought."""
_PACKET = struct.Struct("!16sQH")
_AWAKE = 0.5
"""Seconds after which a thread that hears nothing looks whether it is to end."""
_FORCED = 33
"""SO_RCVBUFFORCE (asm-generic/socket.h)."""
_TIMESTAMPS = 35
"""SO_TIMESTAMPNS (asm-generic/socket.h): the kernel says when a packet came, in a timespec."""
_TIMESPEC = struct.Struct("@ll")


class Arrivals:
    """What came by the tree: how soon, and how fast.

    ``delay``: seconds until anything came. ``rate``: bytes a second, in the second half of the time since then, in
    which connections have got up to speed. Both are None as long as they are not known.
    """

    def __init__(self, begun: float) -> None:
        self._begun = begun
        self._seen: list[tuple[float, int]] = []
        """When, and the bytes that were missing."""

    def note(self, now: float, missing: int) -> None:
        """So many bytes are missing now."""
        if self._seen and missing >= self._seen[0][1]:
            self._seen.clear()  # nothing has come yet
        self._seen.append((now, missing))

    @property
    def delay(self) -> float | None:
        return self._seen[1][0] - self._begun if len(self._seen) > 1 else None

    @property
    def rate(self) -> float | None:
        half = self._seen[len(self._seen) // 2 :]
        if len(half) < 2:
            return None
        return (half[0][1] - half[-1][1]) / (half[-1][0] - half[0][0])


@door
class Probe:
    """Sends nothing of an image, and receives nothing: the tree does, meanwhile."""

    needs = Needs(address=True)
    encrypts = True
    multicasts = False

    def __init__(self, place: Place, source: Content, image: Image) -> None:
        self._address, self._source, self._image = place.address, source, image
        self._mark = hashlib.blake2s(image.digest.encode(), digest_size=16).digest()
        self._begun, self._stopped = threading.Event(), threading.Event()
        self._first = self._last = self._count = 0
        self._trains: dict[int, list[int]] = {}
        """By its number, when the packets of a train came, in nanoseconds."""
        self._listens: float | None = None
        """Since when, or since the first train that came."""
        self._arrivals: Arrivals | None = None

    @property
    def findings(self) -> dict[str, float | None]:
        """``rate``, ``delay``: see ``Arrivals``. ``loss``, ``link``: of multicast, which may bring nothing."""
        came = self._arrivals
        return {
            "rate": came.rate if came else None,
            "delay": came.delay if came else None,
            "loss": self.loss,
            "link": self.link,
        }

    @property
    def loss(self) -> float | None:
        """The part of the sender's small packets that did not come."""
        return 1 - self._count / (self._last - self._first + 1) if self._count else None

    @property
    def link(self) -> float | None:
        """Bytes a second, with headers, at which trains came that waited for the slowest link; 0 if none came."""
        trains = [times for times in list(self._trains.values()) if len(times) > SHORTEST_TRAIN]
        if len(trains) >= TRAINS or (self._listens is not None and time.monotonic() - self._listens >= LISTENS):
            return median(map(_rate, trains)) if trains else 0.0
        return None

    @property
    def sent_bytes(self) -> int:
        return 0

    def offer(self) -> str:
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(self._address))
        Watch("probe-sender", lambda: self._send(sender), self._stopped).start()
        return self._address

    def expect(self) -> str:
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # other agents and transfers of this machine
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        with suppress(PermissionError):
            receiver.setsockopt(socket.SOL_SOCKET, _FORCED, BUFFER)
        receiver.setsockopt(socket.SOL_SOCKET, _TIMESTAMPS, 1)
        receiver.bind((GROUP, PORT))
        here = socket.inet_aton(GROUP) + socket.inet_aton(self._address)
        receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, here)
        receiver.settimeout(_AWAKE)
        self._listens = time.monotonic()
        Watch("probe-receiver", lambda: self._hear(receiver), self._stopped).start()
        return self._address

    def send(self, terms: Terms) -> None:  # noqa: ARG002
        """Send one more train, which all receivers hear: others would take from what the tree brings."""
        self._begun.set()
        self._stopped.wait()

    def receive(self, terms: Terms) -> None:  # noqa: ARG002
        """Look at what the tree brings."""
        self._arrivals = arrivals = Arrivals(time.monotonic())
        while not self._stopped.is_set():
            missing = sum(each.length for each in self._source.lacking(self._image))
            arrivals.note(time.monotonic(), missing)
            self._stopped.wait(LOOK)

    def stop(self) -> None:
        self._stopped.set()

    def _send(self, sender: socket.socket) -> None:
        number = 0
        with sender:
            last = False
            while not self._stopped.is_set():
                for place in range(1, TRAIN + 1):
                    self._send_packet(sender, number, place, PAYLOAD)
                number += 1
                if last:
                    break
                last = self._begun.wait(TRAIN_INTERVAL)
            while not self._stopped.wait(INTERVAL):
                self._send_packet(sender, number)
                number += 1

    def _send_packet(self, sender: socket.socket, number: int, place: int = 0, size: int = 0) -> None:
        with suppress(OSError):  # no route: then it reaches nobody
            sender.sendto(_PACKET.pack(self._mark, number, place).ljust(size, b"\0"), (GROUP, PORT))

    def _hear(self, receiver: socket.socket) -> None:
        with receiver:
            while not self._stopped.is_set():
                try:
                    data, told, _flags, _sender = receiver.recvmsg(_PACKET.size, socket.CMSG_SPACE(_TIMESPEC.size))
                except TimeoutError:
                    continue
                if len(data) == _PACKET.size and data.startswith(self._mark):
                    _mark, number, place = _PACKET.unpack(data)
                    self._note(number, place, _time(told))

    def _note(self, number: int, place: int, came: int) -> None:
        if place:
            if not self._trains:
                self._listens = time.monotonic()
            self._trains.setdefault(number, []).append(came)
            return
        if not self._count:
            self._first = number
        self._last, self._count = max(self._last, number), self._count + 1


def _rate(times: Sequence[int]) -> float:
    """Bytes a second of packets that came at these nanoseconds, since then when they came most slowly.

    The first packets of a train wait for no shaper; later ones come too fast after a busy host has held them up.
    """
    ends = [times[len(times) * part // 6 :] for part in range(5)]
    return min((len(end) - 1) * (PAYLOAD + HEADERS) * 1e9 / max(1, end[-1] - end[0]) for end in ends)


def _time(told: Sequence[tuple[int, int, bytes]]) -> int:
    """When a packet came, in nanoseconds; the time now if the kernel did not say that."""
    for level, kind, data in told:
        if (level, kind) == (socket.SOL_SOCKET, _TIMESTAMPS):
            seconds, nanoseconds = _TIMESPEC.unpack(data[: _TIMESPEC.size])
            return int(seconds) * 10**9 + int(nanoseconds)
    return time.time_ns()
