"""How a deployment is to travel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from testtools import TestCase

from volt.planning import END, FEWEST, METHODS, MOST, TURN, Facts, chain_is_faster, corrected, predict

GIB = 1 << 30
ALL = Facts(
    size=GIB,
    hosts=20,
    fanout=2,
    shape=1,
    rate=100e6,
    hop=0.1,
    link=110e6,
    loss=0.0,
    reached=1.0,
    limit=None,
    encrypt=False,
    able=frozenset(METHODS),
    taken=5.0,
    tried=2.0,
)  # fmt: skip


class PlanningTest(TestCase):
    def possible(self, **more: Any) -> set[str]:
        return set(predict(replace(ALL, **more)))

    def test_what_cannot_be_is_not_predicted(self) -> None:
        every = {"tree", "lazy", "unicast", "bittorrent", "udpcast", "uftp"}
        self.assertEqual(every, self.possible())
        self.assertEqual({"tree", "lazy", "unicast", "uftp"}, self.possible(encrypt=True))
        self.assertEqual(every - {"udpcast", "uftp"}, self.possible(reached=0.9))
        self.assertEqual({"tree", "lazy", "unicast"}, self.possible(able=frozenset()))

    def test_more_takes_longer_and_one_after_the_other_longest(self) -> None:
        one, two = predict(ALL), predict(replace(ALL, size=2 * GIB))
        self.assertTrue(all(one[method] < two[method] for method in one))
        self.assertEqual("unicast", max(one, key=one.__getitem__))
        self.assertTrue(all(predict(replace(ALL, limit=10_000_000))[method] > 2 * one[method] for method in one))

    def test_the_tree_goes_on_from_the_try_and_others_begin_after_it(self) -> None:
        found = predict(replace(ALL, size=100_000_000, hosts=3, rate=10e6, hop=0.5))
        self.assertEqual(5.0 - 2.0 + 3 * 0.5 + 10.0 + END, found["tree"])
        self.assertEqual(5.0 + 3 * (9.5 + TURN) + END, found["unicast"])
        self.assertGreater(found["udpcast"], 5.0)

    def test_bittorrent_is_hardly_faster_than_a_tree_where_tcp_is_slow(self) -> None:
        slow = replace(ALL, rate=5e6)
        self.assertAlmostEqual(GIB / 5.5e6, predict(slow)["bittorrent"], delta=10)
        self.assertEqual(predict(ALL)["udpcast"], predict(replace(slow, tried=0.0))["udpcast"])

    def test_a_chain_is_for_images_that_take_longer_than_its_hops(self) -> None:
        found = [chain_is_faster(mib << 20, hosts, 2) for mib, hosts in ((64, 60), (16, 8), (1, 60), (1024, 65))]
        self.assertEqual([True, True, False, False], found)

    def test_what_is_lost_is_sent_again(self) -> None:
        before, after = predict(ALL), predict(replace(ALL, loss=0.05))
        slower = {method for method in before if after[method] > before[method]}
        self.assertEqual({"udpcast", "uftp"}, slower)

    def test_a_slow_tree_makes_others_better(self) -> None:
        best = [min(found, key=found.__getitem__) for found in (predict(ALL), predict(replace(ALL, rate=5e6)))]
        self.assertEqual("tree", best[0])
        self.assertIn(best[1], {"udpcast", "uftp", "bittorrent"})

    def test_what_has_ended_corrects_the_method_within_bounds(self) -> None:
        ended = [
            ("tree", 1.0, 3.0),
            ("tree", 2.0, 4.0),
            ("tree", 1.0, 2.0),
            ("uftp", 1.0, 99.0),
            ("udpcast", 99.0, 1.0),
        ]
        before = dict.fromkeys(("tree", "lazy", "unicast", "uftp", "udpcast", "bittorrent"), 10.0)
        after = {"tree": 20.0, "lazy": 20.0, "unicast": 20.0, "uftp": 10 * MOST, "udpcast": 10 * FEWEST}
        self.assertEqual({**after, "bittorrent": 10.0}, corrected(before, ended))
        self.assertEqual(before, corrected(before, [("tree", 0.0, 1.0)]))

    def test_people_are_told_why(self) -> None:
        self.assertEqual(
            "1074 MB to 20 hosts, 100.0 MB/s by the tree, links of 110.0 MB/s, multicast reaches 100% of them and"
            " loses 0.0%, not encrypted",
            str(ALL),
        )
        shown = str(replace(ALL, reached=0.0, encrypt=True, limit=5_000_000))
        self.assertIn("multicast reaches none of them, encrypted, at most 5.0 MB/s a host", shown)
