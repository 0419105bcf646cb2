"""The figures of a wave."""

from __future__ import annotations

import zlib
from typing import Any

from testtools import TestCase

from benchmarks import parent_kill
from benchmarks.boot_wave import bars, checksum, ratios
from benchmarks.trace import Read, Trace
from tests.unit.virtman.scene import folder_for


def wave(fetched: list[int], sent: int, attach_s: float) -> dict[str, Any]:
    attached = {"all_s": attach_s, "alone_s": {"median": 0.1}, "bare_processes_s": 0.8}
    return {"fanout": 2, "fetched_bytes_per_host": fetched, "origin_sent_bytes": sent, "attach": attached}


class FiguresTest(TestCase):
    def test_the_host_that_fetched_most_counts(self) -> None:
        found = bars(wave([100, 110], 210, 1.0), wave([], 0, 2.0), {"bytes": 50, "rounded_bytes": 100})
        self.assertAlmostEqual(1.1, found["fetched_to_boot_set"])
        self.assertAlmostEqual(2.2, found["fetched_to_exact_boot_set"])
        self.assertAlmostEqual(1.05, found["origin_sent_to_fanout_boot_sets"])
        self.assertAlmostEqual(2.1, found["origin_sent_to_exact_fanout_boot_sets"])
        self.assertAlmostEqual(10.0, found["attach_all_to_one_alone"])
        self.assertAlmostEqual(1.25, found["attach_all_to_bare_processes"])
        self.assertAlmostEqual(0.5, found["attach_all_to_star"])

    def test_ratios_are_of_the_same_vm(self) -> None:
        one = {"vm_s": {"first": 2.0, "median": 3.0, "slowest": 8.0}}
        other = {"vm_s": {"first": 1.0, "median": 2.0, "slowest": 4.0}}
        self.assertEqual({"first": 2.0, "median": 1.5, "slowest": 2.0}, ratios(one, other))

    def test_the_checksum_is_of_the_reads_in_their_order(self) -> None:
        image = folder_for(self) / "image"
        image.write_bytes(b"abcdefgh")
        reads = tuple(Read(0.0, offset, length) for offset, length in ((5, 3), (0, 2), (1, 1)))
        self.assertEqual(zlib.crc32(b"fghabb"), checksum(image, Trace("sha256:0", 8, 1.0, reads)))


class KillFiguresTest(TestCase):
    def test_rounds_are_summed_up_by_who_was_killed(self) -> None:
        rounds = [
            {
                "role": role, "stall_s": stall, "return_stall_s": 0.1, "longest_before_s": 0.01, "requests": 5,
                "compared_bytes": 100, "errors": errors, "wrong_blocks": [],
            }
            for role, stall, errors in (("parent", 1.0, []), ("grandparent", 0.2, ["lost"]), ("parent", 0.5, []))
        ]  # fmt: skip
        found = parent_kill.summary(rounds)
        self.assertEqual(1.0, found["stall_s"]["max"])
        self.assertEqual(0.2, found["stall_s_by_role"]["grandparent"]["max"])
        self.assertEqual(
            (15, 300, 1, 0), tuple(found[k] for k in ("requests", "compared_bytes", "errors", "wrong_blocks"))
        )
