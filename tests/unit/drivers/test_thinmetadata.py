"""What is read from thin_dump and thin_delta, as their release 0.9 writes it."""

from __future__ import annotations

from xml.parsers.expat import ExpatError

from testtools import TestCase

from drivers.base import Range
from drivers.host.command import OnLine
from drivers.snapshot.thinmetadata import parsed

BLOCK = 64 << 10

DUMP = """<superblock uuid="" time="1" transaction="0" flags="0" version="2" data_block_size="128" nr_data_blocks="0">
  <device dev_id="7" mapped_blocks="7" transaction="0" creation_time="0" snap_time="1">
    <single_mapping origin_block="0" data_block="9" time="0"/>
    <range_mapping origin_begin="1" data_begin="3" length="4" time="0"/>
    <single_mapping origin_block="5" data_block="2" time="1"/>
    <single_mapping origin_block="8" data_block="1" time="1"/>
  </device>
</superblock>"""

DELTA = """<superblock uuid="" time="1" transaction="0" data_block_size="128" nr_data_blocks="0">
  <diff left="1" right="2">
    <different begin="0" length="2"/>
    <right_only begin="2" length="1"/>
    <same begin="3" length="4"/>
    <left_only begin="7" length="1"/>
  </diff>
</superblock>"""


def ranges(text: str) -> list[Range]:
    def feed(take: OnLine) -> None:
        for line in text.splitlines():
            take(line)

    return parsed(feed)


class BlocksTest(TestCase):
    def test_mappings_that_follow_each_other_are_one_range(self) -> None:
        self.assertEqual([Range(0, 6 * BLOCK), Range(8 * BLOCK, BLOCK)], ranges(DUMP))

    def test_what_two_volumes_share_is_left_out(self) -> None:
        self.assertEqual([Range(0, 3 * BLOCK), Range(7 * BLOCK, BLOCK)], ranges(DELTA))

    def test_a_volume_without_mappings_has_no_ranges(self) -> None:
        self.assertEqual([], ranges("\n".join([*DUMP.splitlines()[:2], "</device></superblock>"])))

    def test_an_output_that_ends_early_is_an_error(self) -> None:
        for text in ("", DUMP.removesuffix("</superblock>")):
            self.assertRaises(ExpatError, ranges, text)
