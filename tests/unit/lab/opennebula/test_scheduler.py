"""How a wave of VMs is paced."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from testtools import ExpectedException, TestCase

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

    def test_no_pass_comes_before_the_timer(self) -> None:
        carried = carry_out(["a", "a", "a"], Pace(actions_per_host=1, manager_timer=0.05), lambda _number: None)
        self.assertEqual(3, carried.passes)
        self.assertTrue(carried.all_s >= 0.1)

    def test_an_error_ends_it_without_waiting_for_the_timer(self) -> None:
        def fail(number: int) -> None:
            raise ValueError(number)

        with ExpectedException(ValueError, "0"):
            carry_out(["a", "a"], Pace(actions_per_host=1, manager_timer=10**6), fail)

    def test_what_interrupts_it_does_not_wait_for_actions(self) -> None:
        release, ended = threading.Event(), list[int]()
        self.addCleanup(release.set)

        def interrupted(_signal: int, _frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGUSR1, interrupted)
        self.addCleanup(signal.signal, signal.SIGUSR1, before)

        def act(number: int) -> None:
            if number == 1:  # when it is there, 0 goes on for certain
                os.kill(os.getpid(), signal.SIGUSR1)
            elif release.wait(20):
                return
            ended.append(number)

        with ExpectedException(KeyboardInterrupt):
            carry_out(["a", "a"], Pace(actions_per_host=2), act)
        self.assertNotIn(0, ended)
