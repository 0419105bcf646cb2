"""One host that reads from two parents, one of which goes while it reads."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lab.errors import CommandFailed
from lab.kernel.machine import Machine
from lab.process import attempts
from tests.kernel.machines import FAILED_PATH, KernelCase, changed_on_purpose, cluster

pytestmark = pytest.mark.long

IMAGE = "two-parents"
SERVED = f"virtman-export-{IMAGE}"
"""The map by which a parent serves it."""
PAUSE = 5.0
"""Seconds for which the network pauses, at least."""
TIMEOUT = 600.0
"""Seconds until a test is given up."""


def inside(file: str, *words: str) -> list[str]:
    """The command of a program of ``inside``."""
    program = f"/opt/virtman/tests/kernel/inside/{file}"
    return ["env", "PYTHONPATH=/opt/virtman", "python3", "-W", "ignore", program, *words]


def in_guest(machine: Machine, file: str, *words: str) -> str:
    """Run a program of ``inside`` and return its output."""
    return machine.run(inside(file, *words), timeout=TIMEOUT)


@functools.cache
def warm_up() -> None:
    """Have the folders of the iSCSI fabric made, which stay."""
    machines = cluster().machines.values()
    with ThreadPoolExecutor(len(machines)) as pool:
        list(pool.map(lambda each: in_guest(each, "parent.py", "withdraw", each.address, IMAGE), machines))
    changed_on_purpose()


class TwoParentsTest(KernelCase):
    """Origin and host-2 serve, host-1 reads."""

    forgiven = FAILED_PATH

    def setUp(self) -> None:
        warm_up()
        super().setUp()
        self.second = self.machines["host-2"]
        for machine in (self.origin, self.second):
            self.addCleanup(in_guest, machine, "parent.py", "withdraw", machine.address, IMAGE)
            in_guest(machine, "parent.py", "serve", machine.address, IMAGE, self.host.name)

    def read(self, until: str = "until-lost", policy: str = "failover") -> dict[str, Any]:
        parents = [f"{machine.name}={machine.address}" for machine in (self.origin, self.second)]
        told: dict[str, Any] = json.loads(
            in_guest(self.host, "child.py", IMAGE, until, policy, *parents).splitlines()[-1]
        )
        return told

    def wait_until_it_reads(self) -> None:
        for _ in attempts(TIMEOUT):
            try:
                self.host.run(["test", "-e", "/run/child-reads"])
            except CommandFailed:
                continue
            return
        self.fail("the host does not read")

    def test_a_host_reads_from_one_parent_or_from_all_as_it_is_told(self) -> None:
        for policy, second in (("failover", "standby"), ("round-robin", "active")):
            told = self.read("once", policy)
            self.assertEqual(["origin active", f"host-2 {second}"], told["paths"])
            self.assertEqual(2, len(told["shares"]))
            self.assertEqual(policy == "failover", min(told["shares"]) == 0, told["shares"])

    def strike(self, *commands: Sequence[str]) -> dict[str, Any]:
        """Do something to the origin while the host reads, and return what that says when it has left the origin."""
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(self.read)
            self.wait_until_it_reads()
            self.host.run(["touch", "/run/child-struck"])
            self.began = self.clock()
            for command in commands:
                self.origin.run(command)
            told = reading.result()
        self.assertEqual({"origin"}, set(told["lost"]), "the other one is the last hope")
        self.assertEqual(["origin lost", "host-2 active"], told["paths"])
        return told

    def clock(self) -> float:
        """The host's time since the epoch."""
        return float(self.host.run(["date", "+%s.%N"]))

    def test_removing_a_parents_target_is_no_error_to_a_reader(self) -> None:
        self.strike(inside("parent.py", "withdraw", self.origin.address, IMAGE))

    def test_a_parent_that_falls_silent_is_left_for_the_other(self) -> None:
        self.addCleanup(self.origin.run, ["ip", "link", "set", "eth1", "up"])
        self.assert_left(self.strike(["ip", "link", "set", "eth1", "down"]))

    def test_a_parent_that_hangs_behind_a_live_connection_is_left_for_the_other(self) -> None:
        self.addCleanup(self.origin.run, ["dmsetup", "resume", SERVED])
        self.assert_left(self.strike(["dmsetup", "suspend", SERVED]))

    def test_a_network_that_pauses_costs_no_error_and_reads_go_on_after_it(self) -> None:
        nothing_leaves = ["dev", "eth1", "root", "netem", "loss", "100%"]
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(self.read, "until-stopped")
            self.wait_until_it_reads()
            self.addCleanup(self.host.run, ["sh", "-c", f"tc qdisc del {' '.join(nothing_leaves[:3])} 2>&1 || true"])
            self.host.run(["tc", "qdisc", "add", *nothing_leaves])  # both parents are away from the same moment on
            self.wait_until_it_waits()
            self.host.run(["tc", "qdisc", "del", *nothing_leaves[:3]])
            self.host.run(["touch", "/run/child-stop"])
            told = reading.result()
        self.assertEqual([], told["lost"], "Volt would give all hosts other parents")

    def wait_until_it_waits(self) -> None:
        """Until no read has come back for longer than a parent may take, and than open-iscsi's watch once took."""
        before, since = "", time.monotonic()
        for _ in attempts(TIMEOUT):
            now = self.host.run(["awk", "{print $1}", *(f"/sys/block/{disk}/stat" for disk in ("sda", "sdb"))])
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since >= PAUSE:
                return
        self.fail("the host reads on")

    def assert_left(self, told: dict[str, Any]) -> None:
        """Our own check saw it, before open-iscsi's."""
        since = [said for at, said in told["why"] if at > self.began]
        left = f"{self.origin.address}:3260 does not answer reads, and {self.second.address}:3260 does"
        self.assertIn(left, "; ".join(since), str(told))
