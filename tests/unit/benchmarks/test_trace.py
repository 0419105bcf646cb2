"""The reads of a boot: parsing, keeping, and what they cover."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from testtools import ExpectedException, TestCase

from benchmarks.errors import BadTrace
from benchmarks.trace import Read, boot_set_bytes, clusters, first_touches, parse_nbdkit_log, untouched_offset

LOG = """\
2026-01-02 08:24:13.340357 Preconnect id=1 readonly=1 ...
2026-01-02 08:24:13.340623 connection=1 Connect export="" tls=0 size=0x80000000 write=0 extents=1
2026-01-02 08:24:13.500000 connection=1 Read id=1 offset=0x0 count=0x200 ...
2026-01-02 08:24:13.500100 connection=1 ...Read id=1 return=0
2026-01-02 08:24:14.750000 connection=1 Read id=2 offset=0x241d600 count=0x3a00 ...
2026-01-02 08:24:14.750100 connection=1 ...Read id=2 return=0
2026-01-02 08:24:15.000000 connection=1 Flush id=3 ...
2026-01-02 08:24:16.000000 connection=1 Disconnect transactions=3
"""

reads_strategy = st.lists(
    st.builds(Read, st.just(0.0), st.integers(0, 1 << 20), st.integers(1, 1 << 16)), min_size=1, max_size=30
)


def read(offset: int, length: int) -> Read:
    return Read(0.0, offset, length)


class ParseTest(TestCase):
    def test_only_the_beginnings_of_reads_count_with_seconds_since_the_first(self) -> None:
        found = list(parse_nbdkit_log(LOG.splitlines()))
        self.assertEqual([Read(0.0, 0, 512), Read(1.25, 0x241D600, 0x3A00)], found)


class FiguresTest(TestCase):
    @given(reads_strategy, st.sampled_from([1, 512, 4096, 65536]))
    def test_the_boot_set_is_the_union_of_whole_clusters(self, reads: list[Read], cluster: int) -> None:
        wanted = {number for each in reads for number in clusters(each, cluster)}
        self.assertEqual(len(wanted) * cluster, boot_set_bytes(reads, cluster))

    def test_the_last_cluster_ends_with_the_image(self) -> None:
        self.assertEqual(512, boot_set_bytes([read(4096, 1)], 4096, image_bytes=4608))

    def test_a_read_that_brings_no_new_cluster_is_left_out(self) -> None:
        reads = [read(0, 10), read(4000, 96), read(4000, 97), read(0, 8192), read(8191, 2)]
        self.assertEqual([0, 2, 4], first_touches(reads, 4096))

    def test_the_last_range_that_was_not_read_is_found(self) -> None:
        self.assertEqual(4096, untouched_offset([read(0, 1), read(8192, 4096)], 12288, 4096))
        self.assertEqual(0, untouched_offset([read(8192, 1)], 12288, 4096, lambda offset: offset != 4096))
        with ExpectedException(BadTrace, ".*every 4096 bytes.*"):
            untouched_offset([read(0, 8192)], 8192, 4096)
