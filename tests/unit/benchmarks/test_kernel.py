"""What the benchmarks of the kernel stack make of what they were told."""

from __future__ import annotations

import itertools

from testtools import TestCase

from benchmarks.inside import bootset
from benchmarks.kernel_attach import ratio, steps
from benchmarks.kernel_kill import swap


class SwapTest(TestCase):
    def test_counts_from_the_loss_to_the_next_paths(self) -> None:
        log = [
            (1.0, "INFO drivers.attach.iscsi: image i: paths are now 8:0, 8:16"),
            (2.0, "WARNING drivers.attach.iscsi: image i: parent host-1 lost"),
            (2.5, "INFO drivers.attach.iscsi: image i: paths are now none; reads wait"),
            (3.0, "INFO drivers.attach.iscsi: image i: paths are now 8:16"),
        ]
        self.assertEqual({"noticed_at": 2.0, "swap_s": 1.0}, swap(log))


class StepsTest(TestCase):
    def test_counts_from_the_last_create_to_its_end(self) -> None:
        said = ["create:recorded", "create:done", "create:recorded", "attach:joined", "create:done", "attach:recorded"]
        log = [(float(at), f"DEBUG virtman.steps: step {step}") for at, step in enumerate(said)]
        log.insert(4, (3.5, "INFO drivers.attach.iscsi: image i: paths are now 8:0"))
        wanted = {"create:recorded": 0.0, "attach:joined": 1.0, "path": 1.5, "create:done": 2.0}
        self.assertEqual(wanted, steps(log))


class RatioTest(TestCase):
    def test_compares_each_chain_with_its_star(self) -> None:
        found = ratio({"chain": [{"all_s": 3.0}, {"all_s": 8.0}], "star": [{"all_s": 2.0}, {"all_s": 4.0}]})
        self.assertEqual((2, 1.5, 2.0), (found["n"], found["min"], found["max"]))


class BootSetTest(TestCase):
    size = 256 << 20

    def test_ranges_are_the_same_each_time_and_do_not_overlap(self) -> None:
        found = bootset.ranges(self.size)
        self.assertEqual(found, bootset.ranges(self.size))
        self.assertEqual(bootset.BOOT_SET, sum(length for _, length in found))
        ordered = sorted(found)
        self.assertTrue(all(a + length <= b for (a, length), (b, _) in itertools.pairwise(ordered)))

    def test_requests_cover_the_ranges(self) -> None:
        for most in (4 << 10, 1 << 20):
            found = list(bootset.requests(self.size, most))
            self.assertEqual(bootset.BOOT_SET, sum(length for _, length in found))
            self.assertTrue(all(length <= most for _, length in found))
