"""By udpcast: one host multicasts, and hosts that missed something tell it after each slice.

Options as in udp-sender(1) and udp-receiver(1); why they are as they are was read in the sources of udpcast 20120424.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from drivers.base import Image, Place
from drivers.door import door
from drivers.errors import DriverError
from drivers.needs import Needs, Tool
from drivers.transfer import multicast
from drivers.transfer.contract import Content, Terms
from drivers.transfer.program import Program

BATCH = 4 << 20
"""Bytes that are handed to the source, or taken from it, at once."""
SLICE = 1024
"""Packets after which all receivers are asked for what they missed: the most that the protocol can (MAX_SLICE_SIZE).
A host that is much slower than the others misses most of a slice again and again, and is dropped for that."""
TRIES = 11
"""How often a receiver is asked for a slice before it is dropped. After the tenth time the sender waits a second for
an answer (senddata.c, netSenderMain), which is what a receiver gets that is busy."""
SILENCE = 10
"""Seconds without a packet after which a receiver ends."""
HELLO = 500
"""Milliseconds between calls for receivers: the first may come too early, or get lost."""
RATE = 112_500_000
"""Bytes a second without a limit: 0.9 Gbit/s. Nothing in the protocol finds out what a network can carry."""


@door
class UdpcastTransfer:
    """All receivers at once, in the clear."""

    needs = Needs(tools=(Tool("udp-sender", "udpcast"), Tool("udp-receiver", "udpcast")), address=True)
    encrypts = False
    multicasts = True

    def __init__(self, place: Place, source: Content, image: Image) -> None:
        self._address, self._source, self._image = place.address, source, image
        self._runner = multicast.Runner()
        self._sent = 0

    def offer(self) -> str:
        return self.expect()

    def expect(self) -> str:
        multicast.number_of(self._address)
        return self._address

    def send(self, terms: Terms) -> None:
        control, data = multicast.groups(terms)
        wait, rate = multicast.patience(terms), 8 * (terms.limit or RATE)
        with self._runner.until_stopped(), _pipe() as (reader, writer):
            options = {
                "mcast-data-address": data, "min-receivers": len(terms.receivers), "max-wait": wait,
                "rexmit-hello-interval": HELLO, "slice-size": SLICE, "retries-until-drop": TRIES, "max-bitrate": rate,
            }  # fmt: skip
            argv = [*self._argv("udp-sender", terms, control, options), "--full-duplex"]
            with self._runner.running(Program(argv, stdin=reader.fileno())) as program:
                reader.close()
                for batch in multicast.batches(terms.ranges, BATCH):
                    self._source.get(self._image, batch, writer.fileno())
                    self._sent += multicast.length(batch)
                writer.close()
                program.wait()

    def receive(self, terms: Terms) -> None:
        control, _ = multicast.groups(terms)
        longest = 3 * SILENCE + 2 * multicast.patience(terms) + 2 * BATCH // (terms.limit or BATCH)
        with self._runner.until_stopped(), _pipe() as (reader, writer):
            argv = self._argv("udp-receiver", terms, control, {"receive-timeout": SILENCE, "rcvbuf": "8m"})
            with self._runner.running(Program(argv, stdout=writer.fileno())) as program:
                writer.close()
                for batch in multicast.batches(terms.ranges, BATCH):
                    with _at_most(longest, program):
                        if self._source.put(self._image, batch, reader.fileno()).full:
                            raise DriverError(f"no room for image {self._image.name}")
                with _at_most(longest, program):
                    program.wait()

    def stop(self) -> None:
        self._runner.stop()

    @property
    def sent_bytes(self) -> int:
        return self._sent

    def _argv(self, program: str, terms: Terms, control: str, options: dict[str, object]) -> list[str]:
        common = {
            "interface": self._address, "portbase": multicast.port(terms), "mcast-rdv-address": control,
            "start-timeout": 2 * multicast.patience(terms),
        }  # fmt: skip
        words = [word for name, value in {**common, **options}.items() for word in (f"--{name}", str(value))]
        return [program, *words, "--nokbd", "--no-progress"]


@contextmanager
def _pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Both ends, which may be closed before."""
    read, write = os.pipe()
    with os.fdopen(read, "rb", buffering=0) as reader, os.fdopen(write, "wb", buffering=0) as writer:
        yield reader, writer


@contextmanager
def _at_most(seconds: float, program: Program) -> Iterator[None]:
    """Kill a receiver that hangs: one that is dropped at the end waits for ever (receivedata.c, netEndReached)."""
    timer = threading.Timer(seconds, program.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
