"""What methods by multicast share: addresses and ports, batches of ranges, and programs that ``stop`` ends."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from drivers.base import Range
from drivers.errors import DriverError
from drivers.transfer.contract import Terms
from drivers.transfer.program import Program

log = logging.getLogger(__name__)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

GROUPS = ipaddress.ip_network("239.192.0.0/14")
"""For use within an organization (RFC 2365, 6.2). No two of them have the same Ethernet address (RFC 1112, 6.4)."""
PORTS = range(20480, 32768, 2)
"""Pairs of ports, which the kernel gives to nobody by itself (Linux: ip-sysctl, ip_local_port_range)."""
PATIENCE = 5
"""Seconds for which nobody holds the others up for longer, as long as there are few hosts."""
RECEIVERS_PER_SECOND = 50
"""Hosts of a deployment that hear from Volt within a second (volt/legs.py, BEATS_PER_SECOND)."""


def number_of(address: str) -> int:
    """An IPv4 address as a number. Raises DriverError if it is none."""
    try:
        return int(ipaddress.IPv4Address(address))
    except ValueError as error:
        raise DriverError(f"for multicast this host needs an IPv4 address, and has {address!r}") from error


def groups(terms: Terms, network: Network = GROUPS) -> tuple[str, str]:
    """Two multicast addresses that no other transfer uses: to find each other, and for the data."""
    first = 2 * terms.number % network.num_addresses
    return str(network[first]), str(network[first + 1])


def port(terms: Terms) -> int:
    """The first of two UDP ports that no other transfer of these hosts uses."""
    return PORTS[terms.number % len(PORTS)]


def patience(terms: Terms) -> int:
    """Seconds that a sender waits for the other receivers when one has come."""
    return PATIENCE + len(terms.receivers) // RECEIVERS_PER_SECOND


def batches(ranges: Sequence[Range], size: int) -> Iterator[list[Range]]:
    """The same ranges in order, in lists of ``size`` bytes at most: a multiple of a chunk's."""
    batch: list[Range] = []
    for piece in _pieces(ranges, size):
        if batch and length(batch) + piece.length > size:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _pieces(ranges: Sequence[Range], size: int) -> Iterator[Range]:
    """Cut where the offset in the image is a multiple of ``size``, and so where a chunk begins."""
    for each in ranges:
        offset, end = each.offset, each.offset + each.length
        while offset < end:
            cut = min(end, offset - offset % size + size)
            yield Range(offset, cut - offset)
            offset = cut


def length(ranges: Sequence[Range]) -> int:
    """The bytes of ranges together."""
    return sum(each.length for each in ranges)


class Runner:
    """Runs programs one after the other, until ``stop``."""

    def __init__(self) -> None:
        self.stopped = False
        self._program: Program | None = None

    @contextmanager
    def running(self, program: Program) -> Iterator[Program]:
        """The program, which runs, or is killed if it is too late."""
        with program:
            self._program = program
            if self.stopped:
                program.kill()
            try:
                yield program
            except DriverError as error:
                log.info("%s; the program said: %s", error, program.said)
                raise

    @contextmanager
    def until_stopped(self) -> Iterator[None]:
        """After ``stop`` no error is one."""
        try:
            yield
        except (DriverError, OSError):
            if not self.stopped:
                raise

    def stop(self) -> None:
        """End what runs, and what is still to come."""
        self.stopped = True
        if self._program is not None:
            self._program.kill()
