"""What a network between hosts can do, found out while they get ready: the method ``auto`` of drivers/transfer.

The host that would send multicasts small numbered packets. Hosts that would receive count them, and read the beginning
of what they lack from the tree: these bytes they need anyway.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from drivers.base import Image, Place, Range
from drivers.door import door
from drivers.host.watch import Watch
from drivers.needs import Needs
from drivers.transfer.contract import Content, Terms

GROUP, PORT = "239.255.86.77", 20478
"""A multicast group for local use (RFC 2365, 6.1), and a port that the kernel gives to nobody by itself."""
INTERVAL = 0.01
"""Seconds between two packets."""
SAMPLE, LARGEST_SAMPLE, PART = 1 << 20, 8 << 20, 32
"""Bytes that a host reads, at least and at most; between these, one part in so many of what it lacks."""
_PACKET = struct.Struct("!16sQ")
_AWAKE = 0.5
"""Seconds after which a thread that hears nothing looks whether it is to end."""


@door
class Probe:
    """Sends nothing of an image: it only gets ready."""

    needs = Needs(address=True)
    encrypts = True

    def __init__(self, place: Place, source: Content, image: Image) -> None:
        self._address, self._source, self._image = place.address, source, image
        self._mark = hashlib.blake2s(image.digest.encode(), digest_size=16).digest()
        self._stopped = threading.Event()
        self._first = self._last = self._count = 0
        self.rate: float | None = None

    @property
    def loss(self) -> float | None:
        """The part of the sender's packets that did not come; None as long as multicast brings nothing."""
        return 1 - self._count / (self._last - self._first + 1) if self._count else None

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
        receiver.bind((GROUP, PORT))
        here = socket.inet_aton(GROUP) + socket.inet_aton(self._address)
        receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, here)
        receiver.settimeout(_AWAKE)
        Watch("probe-receiver", lambda: self._count_packets(receiver), self._stopped).start()
        self._sample()
        return self._address

    def send(self, terms: Terms) -> None:
        """Nothing."""

    def receive(self, terms: Terms) -> None:
        """Nothing."""

    def stop(self) -> None:
        self._stopped.set()

    def _send(self, sender: socket.socket) -> None:
        number = 0
        with sender:
            while not self._stopped.wait(INTERVAL):
                with suppress(OSError):  # no route: then it reaches nobody
                    sender.sendto(_PACKET.pack(self._mark, number), (GROUP, PORT))
                number += 1

    def _count_packets(self, receiver: socket.socket) -> None:
        with receiver:
            while not self._stopped.is_set():
                try:
                    data = receiver.recv(_PACKET.size)
                except TimeoutError:
                    continue
                if len(data) == _PACKET.size and data.startswith(self._mark):
                    self._note(_PACKET.unpack(data)[1])

    def _note(self, number: int) -> None:
        if not self._count:
            self._first = number
        self._last, self._count = max(self._last, number), self._count + 1

    def _sample(self) -> None:
        lacking = self._source.lacking(self._image)
        missing = sum(each.length for each in lacking)
        sample = list(_beginning(lacking, min(max(SAMPLE, missing // PART), LARGEST_SAMPLE)))
        if not sample:
            return
        with _nowhere() as file:
            begun = time.monotonic()
            self._source.get(self._image, sample, file)
            self.rate = sum(each.length for each in sample) / (time.monotonic() - begun)


def _beginning(ranges: Sequence[Range], size: int) -> Iterator[Range]:
    """The first bytes that ranges have."""
    for each in ranges:
        if size <= 0:
            return
        yield Range(each.offset, min(size, each.length))
        size -= each.length


@contextmanager
def _nowhere() -> Iterator[int]:
    file = os.open(Path(os.devnull), os.O_WRONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)
