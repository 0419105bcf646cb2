"""When the first VM of a wave has its image deployed to all hosts, and that no VM fails because of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

from testtools import TestCase

from opennebula_tm.driver.card import Cards
from opennebula_tm.driver.deploying import METHODS, RETRY, Deployments, check_method
from opennebula_tm.driver.errors import Refused
from tests.unit.opennebula_tm.steps import StepsTestCase
from volt.planning import METHODS as OF_VOLT

IMAGE = "one-7-0a1b2c3d"
CREATED, TOOK, KEEP = 1_700_000_000, 60, 86400
ENDED = CREATED + TOOK


def deployment(*states: str, ended: bool = True, cancelled: bool = False) -> dict[str, Any]:
    """What virtman says of one, with a host in each of these states."""
    return {
        "id": 3, "image": IMAGE, "created": datetime.fromtimestamp(CREATED, UTC).isoformat(), "seconds": TOOK,
        "keep_s": KEEP, "ended": ended, "cancelled": cancelled, "hosts": [{"state": state} for state in states],
    }  # fmt: skip


class MethodTest(TestCase):
    def test_the_methods_are_those_of_volt(self) -> None:
        self.assertEqual({"auto", *OF_VOLT}, set(METHODS))

    def test_another_value_is_refused_in_one_line_with_those_that_there_are(self) -> None:
        self.assertEqual(["", "tree"], [check_method(text) for text in (" ", " Tree")])
        said = str(self.assertRaises(Refused, check_method, "carrier pigeon"))
        for part in ("VIRTMAN_METHOD", "'carrier pigeon'", *METHODS):
            self.assertIn(part, said)


class DeploymentsTest(StepsTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.cards = Cards()
        self.path = PurePosixPath(self.datastores) / "100" / IMAGE

    def begin(self, method: str = "tree", now: float = ENDED) -> list[str]:
        """Begin one. Returns the steps on hosts."""
        Deployments(self.hosts, self.cards, lambda: now).begin("host-1", self.path, IMAGE, method)
        return self.done()

    def test_the_agent_of_the_vms_host_deploys_the_image(self) -> None:
        Deployments(self.hosts, self.cards).begin("host-1", self.path, IMAGE, "Tree")
        self.assertEqual([["host-1", "deployment", IMAGE], ["host-1", "deploy", IMAGE, "tree"]], self.steps())

    def test_nobody_is_asked_without_the_attribute(self) -> None:
        self.assertEqual([], self.begin(method=""))

    def test_what_was_deployed_before_is_not_deployed_by_each_vm(self) -> None:
        failed = deployment("whole", "failed")
        for newest, now, again in (
            (deployment("filling", ended=False), ENDED, False),
            (deployment("filling", ended=False), CREATED + KEEP, False),
            (deployment("whole", "whole"), CREATED + KEEP - 1, False),
            (deployment("whole", "whole"), CREATED + KEEP, True),
            (failed, ENDED + RETRY - 1, False),
            (failed, ENDED + RETRY, True),
            (deployment("whole", "lost"), ENDED + RETRY, True),
            (deployment("whole", cancelled=True), ENDED + RETRY - 1, False),
            (deployment("whole", cancelled=True), ENDED + RETRY, True),
        ):
            self.says("host-1", "deployment", json.dumps(newest))
            self.assertEqual(again, "host-1 deploy" in self.begin(now=now), f"{newest} at {now}")

    def test_while_another_vm_asks_this_one_does_not_wait(self) -> None:
        with self.cards.locked(self.path):
            self.assertEqual([], self.begin())
        self.assertEqual(["host-1 deployment", "host-1 deploy"], self.begin())

    def test_what_fails_is_one_line_of_the_log_and_nothing_else(self) -> None:
        for step, answer, why in (
            ("deployment", "Volt is away", "host-1: Volt is away"),
            ("deploy", "no host has what the method uftp needs", "host-1: no host has"),
        ):
            self.says("host-1", step, answer, fails=True)
            self.warns(why)
            self.says("host-1", step)
        for answer in ("[]", "{}", "?", json.dumps(deployment("whole") | {"created": "yesterday"})):
            self.says("host-1", "deployment", answer)
            self.warns("host-1: virtman")
        self.warns("'pigeon'", "pigeon")

    def warns(self, why: str, method: str = "uftp") -> None:
        with self.assertLogs("opennebula_tm", "WARNING") as logged:
            self.begin(method)
        (line,) = logged.output
        self.assertIn(f"image {IMAGE} is not deployed: ", line)
        self.assertIn(why, line)
        self.assertNotIn("\n", line)
