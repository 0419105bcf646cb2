"""How a wave of VMs is paced."""

from __future__ import annotations

import threading

from testtools import TestCase

from lab.opennebula import Pace, Plan, carry_out

HOSTS = ["a", "b"] * 4


class PlanTest(TestCase):
    def test_a_pass_starts_as_many_on_a_host_as_it_may(self) -> None:
        plan = Plan(HOSTS, Pace(actions_per_host=1))
        self.assertEqual([0, 1], plan.next_pass())
        self.assertEqual([], plan.next_pass())

    def test_a_pass_ends_at_the_first_busy_host(self) -> None:
        plan = Plan(["a", "a", "b"], Pace(actions_per_host=1))
        self.assertEqual([0], plan.next_pass())
        plan.ended(0)
        self.assertEqual([1, 2], plan.next_pass())
        self.assertTrue(plan.all_begun)

    def test_the_cluster_has_a_limit_of_its_own(self) -> None:
        plan = Plan(HOSTS, Pace(actions_per_host=5, actions_per_cluster=3))
        self.assertEqual([0, 1, 2], plan.next_pass())
        plan.ended(1)
        self.assertEqual([3], plan.next_pass())


class CarryOutTest(TestCase):
    def test_each_action_is_done_once(self) -> None:
        done: list[int] = []
        carried = carry_out(HOSTS, Pace(actions_per_host=2, manager_timer=0.01), done.append)
        self.assertEqual(list(range(8)), sorted(done))
        self.assertTrue(carried.passes >= 2)
        self.assertEqual(8, len(carried.each_s))

    def test_those_of_a_pass_go_side_by_side(self) -> None:
        together = threading.Barrier(8, timeout=60)
        carried = carry_out(HOSTS, Pace(actions_per_host=4), lambda _number: together.wait())
        self.assertEqual(1, carried.passes)
