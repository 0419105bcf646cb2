"""Addresses, ports and batches of transfers by multicast."""

from __future__ import annotations

import ipaddress

from hypothesis import given
from hypothesis import strategies as st
from testtools import TestCase

from drivers.base import Range
from drivers.transfer import multicast
from drivers.transfer.contract import Terms

CHUNK = 64 << 10
BATCH = 4 * CHUNK


def terms(number: int) -> Terms:
    """A transfer that only has a number."""
    return Terms(number, [], "", [])


class MulticastTest(TestCase):
    def test_transfers_that_follow_each_other_share_neither_addresses_nor_ports(self) -> None:
        numbers = range(10**9, 10**9 + 1000)
        groups = {address for number in numbers for address in multicast.groups(terms(number))}
        self.assertEqual(2000, len(groups))
        self.assertTrue(all(ipaddress.ip_address(address).is_multicast for address in groups))
        ports = {multicast.port(terms(number)) for number in numbers}
        self.assertEqual((1000, {0}), (len(ports), {port % 2 for port in ports}))

    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=6), st.integers(1, CHUNK))
    def test_batches_are_the_same_chunks_in_order(self, gaps: list[tuple[int, int]], last: int) -> None:
        ranges, at = [], 0
        for gap, chunks in gaps:
            ranges.append(Range(at + gap * CHUNK, chunks * CHUNK))
            at = ranges[-1].offset + ranges[-1].length
        ranges.append(Range(at, last))
        batches = list(multicast.batches(ranges, BATCH))
        self.assertTrue(all(0 < multicast.length(batch) <= BATCH for batch in batches))
        self.assertEqual(_chunks(ranges), [chunk for batch in batches for chunk in _chunks(batch)])


def _chunks(ranges: list[Range]) -> list[tuple[int, int]]:
    """Offset and length of each chunk."""
    return [
        (at, min(CHUNK, each.offset + each.length - at))
        for each in ranges
        for at in range(each.offset, each.offset + each.length, CHUNK)
    ]
