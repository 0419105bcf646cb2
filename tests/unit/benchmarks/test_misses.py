"""Telling a host's misses from what its cache had already."""

from __future__ import annotations

from testtools import TestCase

from benchmarks.misses import Place, by_depth, misses
from benchmarks.nbdreplay import HostTimes

PLACES = {"top": Place("origin", 1), "leaf": Place("top", 2), "other": Place("origin", 1)}


class MissesTest(TestCase):
    def test_a_read_that_a_host_below_asked_for_earlier_is_not_a_miss(self) -> None:
        hosts = {
            "top": HostTimes([1.0, 5.0, 3.0], [0.1, 0.2, 0.3]),
            "leaf": HostTimes([2.0, 4.0, 6.0], [0.4, 0.5, 0.6]),
        }
        found = misses(hosts, PLACES, [0, 1, 2])
        self.assertEqual({"top": [0.1, 0.3], "leaf": [0.4, 0.5, 0.6]}, found)

    def test_what_came_through_two_levels_counts_for_both(self) -> None:
        places = PLACES | {"deep": Place("leaf", 3)}
        hosts = {"top": HostTimes([3.0], [0.1]), "leaf": HostTimes([2.0], [0.2]), "deep": HostTimes([1.0], [0.3])}
        self.assertEqual({"top": [], "leaf": [], "deep": [0.3]}, misses(hosts, places, [0]))


class ByDepthTest(TestCase):
    def test_hosts_of_one_depth_are_taken_together(self) -> None:
        values = {"top": [0.1, 0.3], "other": [0.2], "leaf": [0.5]}
        self.assertEqual(
            {1: {"n": 3, "p50": 0.2, "p99": 0.3}, 2: {"n": 1, "p50": 0.5, "p99": 0.5}}, by_depth(values, PLACES)
        )
