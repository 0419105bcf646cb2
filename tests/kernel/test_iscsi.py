"""One host that reads from two parents, one of which goes while it reads."""

from __future__ import annotations

import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lab.errors import CommandFailed
from lab.kernel.machine import Machine
from lab.process import attempts
from tests.kernel.machines import FAILED_PATH, KernelCase, changed_on_purpose, cluster

IMAGE = "two-parents"
SERVED = f"virtman-export-{IMAGE}"
"""The map by which a parent serves it."""
PAUSE = 5.0
"""Seconds for which the network pauses, at least."""
TIMEOUT = 600.0
"""Seconds until a test is given up."""


def in_guest(machine: Machine, file: str, *words: str) -> str:
    """Run a program of ``inside`` and return its output."""
    command = ["python3", "-W", "ignore", f"/opt/virtman/tests/kernel/inside/{file}", *words]
    return machine.run(["env", "PYTHONPATH=/opt/virtman", *command], timeout=TIMEOUT)


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

    def test_removing_a_parents_target_is_no_error_to_a_reader(self) -> None:
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(self.read)
            self.wait_until_it_reads()
            in_guest(self.origin, "parent.py", "withdraw", self.origin.address, IMAGE)
            told = reading.result()
        self.assertEqual((["origin"], ["origin lost", "host-2 active"]), (told["lost"], told["paths"]))

    def test_a_parent_that_falls_silent_is_left_for_the_other(self) -> None:
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(self.read)
            self.wait_until_it_reads()
            self.addCleanup(self.origin.run, ["ip", "link", "set", "eth1", "up"])
            self.origin.run(["ip", "link", "set", "eth1", "down"])
            told = reading.result()
        self.assertEqual((["origin"], ["origin lost", "host-2 active"]), (told["lost"], told["paths"]))
        self.assert_left("is silent", told)

    def test_a_parent_that_hangs_behind_a_live_connection_is_left_for_the_other(self) -> None:
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(self.read)
            self.wait_until_it_reads()
            self.addCleanup(self.origin.run, ["dmsetup", "resume", SERVED])
            self.origin.run(["dmsetup", "suspend", SERVED])
            told = reading.result()
        self.assertEqual((["origin"], ["origin lost", "host-2 active"]), (told["lost"], told["paths"]))
        self.assert_left("hangs", told)

    def test_a_network_that_pauses_costs_no_error_and_reads_go_on_after_it(self) -> None:
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(self.read, "until-stopped")
            self.wait_until_it_reads()
            for machine in (self.origin, self.second):
                self.addCleanup(machine.run, ["ip", "link", "set", "eth1", "up"])
                machine.run(["ip", "link", "set", "eth1", "down"])
            self.wait_until_it_waits()
            for machine in (self.origin, self.second):
                machine.run(["ip", "link", "set", "eth1", "up"])
            self.host.run(["touch", "/run/child-stop"])
            told = reading.result()
        self.assertIn("no other answers", told["why"][0])
        self.assertEqual([], [why for why in told["why"] if " answers" in why and "no other" not in why], str(told))

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

    def assert_left(self, why: str, told: dict[str, Any]) -> None:
        """Our own watch saw it: open-iscsi's takes half a minute."""
        self.assertEqual(1, len(told["why"]), str(told))
        self.assertIn(f"{self.origin.address}:3260 {why}", told["why"][0])
