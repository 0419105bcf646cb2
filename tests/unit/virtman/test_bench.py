"""The commands that time boots and deployments, over an agent of doubles."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree as ET

from testtools.matchers import Contains, MatchesRegex

from tests.unit.virtman.agents import MIB
from tests.unit.virtman.test_cli import BOOT, AgentCliTest
from virtman import bench
from virtman.client import AgentClient
from virtman.errors import DriverTrouble, HypervisorError
from virtman.models import Booted
from volt.client import Deployment, DeploymentHost, Host, HostState, TransferState
from volt.deploymodels import DeploymentLeg

WAITING, READY, FILLING, WHOLE = (TransferState(state) for state in ("waiting", "ready", "filling", "whole"))


class BenchBootTest(AgentCliTest):
    def setUp(self) -> None:
        super().setUp()
        self.booted: list[str] = []
        self.guest: Callable[[Path], object] = self.logs_in
        real = AgentClient.boot

        def boot(client: AgentClient, vm: str, *arguments: Any, **how: Any) -> Booted:
            answer = real(client, vm, *arguments, **how)
            self.booted.append(vm)
            self.guest(Path(answer.machine.console_log))
            return answer

        self.enterContext(mock.patch.object(AgentClient, "boot", boot))

    def logs_in(self, log: Path) -> object:
        """What happens in each VM when it was started, unless a test says something else."""
        return log.write_bytes(b"Linux\ndebian login: ")

    def assert_nothing_is_left(self) -> None:
        self.assertEqual(([], {}), (self.site.domains(), self.site.host.disks))
        self.assertEqual([], self.json("list"))

    def bench(self, *options: object, code: int = 0) -> str:
        """What is printed of a timing."""
        printed = self.run_virtman("bench", "boot", "debian", *BOOT, *options, code=code).stdout
        self.assert_nothing_is_left()
        return printed

    def test_a_wave_is_timed_and_destroyed(self) -> None:
        said = self.bench("--vms", 3)
        self.assertThat(said, MatchesRegex(r"image debian was not attached here before\n1 at a time: 3 of 3 in \d"))
        for stage in ("pending", "disk", "start", "running", "console", "guest"):
            self.assertThat(said, Contains(f"\n{stage} "))
        self.assertThat(said, MatchesRegex(r"(?s).*\n\nwhat cost most: \w+, \d+% of the time \(its setting: .*\)\n$"))
        self.assertEqual(3, len(set(self.booted)))

    def test_several_numbers_at_a_time_are_compared_after_a_first_boot(self) -> None:
        said = self.bench("--vms", 2, "--parallel", "1,2,1")
        self.assertThat(said, Contains("one VM had booted before these waves\n1 at a time: 2 of 2"))
        self.assertThat(said, MatchesRegex(r"(?s).*\nfastest: [12] at a time\n"))
        self.assertEqual(5, len(set(self.booted)))

    def test_for_scripts_and_in_a_folder(self) -> None:
        folder = self.socket.parent / "made" / "here"
        answer = self.json("bench", "boot", "debian", *BOOT, "--vms", 2, "--out", folder)
        self.assertEqual(answer, json.loads((folder / "result.json").read_text()))
        self.assertEqual(("boot", "debian", "here"), (answer["kind"], answer["image"], answer["host"]))
        [[first, _]] = [each["runs"] for each in answer["rounds"]]
        self.assertEqual(["pending", "disk", "start", "running", "console", "guest"], list(first["seconds"]))
        self.assertEqual("{http://www.w3.org/2000/svg}svg", ET.parse(folder / "plot.svg").getroot().tag)
        file = self.socket.parent / "file"
        file.touch()
        self.assertThat(self.fails("bench", "boot", "debian", *BOOT, "--out", file / "x"), Contains("cannot write"))

    def test_without_a_message_a_vm_is_up_when_it_runs(self) -> None:
        self.guest = lambda log: log.unlink(missing_ok=True)
        answer = self.json("bench", "boot", "debian", *BOOT, "--message", "")
        self.assertEqual("running", list(answer["rounds"][0]["runs"][0]["seconds"])[-1])

    def test_a_message_that_does_not_come_is_named(self) -> None:
        said = self.bench("--message", "other", "--timeout", 0.1, code=1)
        self.assertThat(said, Contains("showed something else, and not 'other', within 0.1 s; say with --message"))
        self.guest = lambda log: log.write_bytes(b"")
        self.assertThat(self.bench("--timeout", 0.1, code=1), Contains("showed nothing, and not 'login:'"))
        self.guest = lambda log: log.unlink(missing_ok=True)
        self.assertThat(self.bench(code=1), Contains("cannot be read"))

    def test_the_message_may_come_in_parts(self) -> None:
        def write(log: Path) -> None:
            log.write_bytes(b"debian lo")
            later = threading.Timer(0.1, log.write_bytes, [b"debian login: "])
            self.addCleanup(later.join)
            later.start()

        self.guest = write
        self.bench()

    def test_a_boot_that_fails_leaves_nothing_and_the_others_go_on(self) -> None:
        def fail_second(log: Path) -> None:
            if len(self.booted) == 2:
                raise HypervisorError("no more")
            self.logs_in(log)

        self.guest = fail_second
        said = self.bench("--vms", 3, code=1)
        self.assertThat(said, MatchesRegex(r"(?s).*1 at a time: 2 of 3 in .*\n  bench-[0-9a-f]{8}-2: no more\n"))

    def test_when_all_fail_only_that_is_said(self) -> None:
        said = self.run_virtman("bench", "boot", "unknown", *BOOT, code=1).stdout
        self.assertThat(said, MatchesRegex(r"(?s).*0 of 1 in 0\.00 s\n  bench-\w+-1: [^\n]*unknown[^\n]*\n$"))
        self.assert_nothing_is_left()

    def test_ctrl_c_and_other_ends_leave_nothing(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self.booted.clear()
            self.guest = partial(self.interrupts, number)
            self.run_virtman("bench", "boot", "debian", *BOOT, "--vms", 5, "--parallel", 2, "--timeout", 600, code=1)
            self.assertLess(len(self.booted), 5)
            self.assert_nothing_is_left()

    def interrupts(self, number: signal.Signals, log: Path) -> object:
        """The command gets a signal before the VM is up."""
        os.kill(os.getpid(), number)
        return log.write_bytes(b"x")

    def test_vms_that_cannot_be_destroyed_are_named(self) -> None:
        with mock.patch.object(AgentClient, "destroy", side_effect=DriverTrouble("stuck")):
            said = self.fails("bench", "boot", "debian", *BOOT)
        self.assertThat(said, MatchesRegex(r"virtman: VMs bench-\w+-… are left, .* virtman destroy: stuck\n"))

    def test_misuse(self) -> None:
        for wrong in (("--vms", 0), ("--parallel", "0"), ("--parallel", "1,x"), ("--parallel", ""), ("--timeout", 0)):
            self.misused("bench", "boot", "debian", *wrong)


class BenchDeployTest(AgentCliTest):
    def deployment(self, seconds: float, **hosts: TransferState) -> Deployment:
        found = [
            DeploymentHost(
                host=name,
                state=state,
                done=MIB // 4,
                total=0 if state is WAITING else MIB,
                seconds=seconds if state is WHOLE else None,
            )
            for name, state in hosts.items()
        ]
        return Deployment(
            id=7, image="debian", size=MIB, digest="id:x", asked="auto", method="unicast", encrypt=None, keep_s=86400,
            created=datetime(2026, 1, 1, tzinfo=UTC), seconds=seconds, cancelled=False, hosts=found,
            ended=not {*hosts.values()} & {WAITING, READY, FILLING},
            legs=[DeploymentLeg(source="origin", sent=3 * MIB, receivers=1, begun=0, ended=True)],
        )  # fmt: skip

    def follow(self, *looks: Deployment) -> mock.Mock:
        """Have a deployment look so, one look after the other. Returns what Volt is asked with."""
        left = [*looks]
        deploy = mock.Mock(return_value=looks[0])
        seen = datetime(2026, 1, 1, tzinfo=UTC)
        known = [
            Host(name=name, address="x:1", place="", state=HostState.ALIVE, last_seen=seen, whole=whole)
            for name, whole in (("one", []), ("two", []), ("had", ["debian"]))
        ]
        for name, call in (
            ("deploy", deploy),
            ("deployment", lambda _number: left.pop(0) if len(left) > 1 else left[0]),
            ("hosts", lambda: known),
        ):
            self.patch(self.agent.stacks.volt, name, call)
        self.patch(bench, "LOOK", 0.0)
        return deploy

    def test_each_host_is_timed_by_its_stages(self) -> None:
        deploy = self.follow(
            self.deployment(0, one=WAITING, two=WAITING, had=WAITING),
            self.deployment(1, one=READY, two=READY, had=WHOLE),
            self.deployment(2, one=FILLING, two=READY, had=WHOLE),
            self.deployment(6, one=WHOLE, two=WHOLE, had=WHOLE),
        )
        arguments = ("bench", "deploy", "debian", "--all", "--method", "unicast", "--limit", "2M")
        answer = self.json(*arguments)
        one, two = answer["rounds"][0]["runs"]
        self.assertEqual({"waiting": 1, "ready": 1, "filling": 4}, one["seconds"])
        self.assertEqual({"waiting": 1, "ready": 5, "filling": 0}, two["seconds"])
        self.assertEqual(3 * MIB, answer["legs"][0]["sent"])
        self.assertIn("what cost most: ready", answer["cost_most"])
        wanted = deploy.call_args.args[0]
        self.assertEqual((86400, "unicast", 2 * MIB), (wanted.keep_s, wanted.method, wanted.limit))

    def test_while_auto_tries_the_network_a_host_waits(self) -> None:
        trying = self.deployment(1, one=FILLING).model_copy(update={"method": "auto"})
        chosen = self.deployment(9, one=WHOLE).model_copy(update={"why": "4 hosts, 100M a second"})
        stale, ready, filling = (
            self.deployment(at, one=state) for at, state in ((2, FILLING), (3, READY), (4, FILLING))
        )
        self.follow(self.deployment(0, one=WAITING), trying, stale, ready, filling, chosen)
        answer = self.json("bench", "deploy", "debian", "--all")
        self.assertEqual({"waiting": 1, "ready": 3, "filling": 5}, answer["rounds"][0]["runs"][0]["seconds"])
        self.assertIn("auto chose unicast: 4 hosts, 100M a second", answer["notes"])

    def test_for_people(self) -> None:
        self.follow(self.deployment(0, one=WAITING, had=WAITING), self.deployment(2, one=WHOLE, had=WHOLE))
        said = self.out("bench", "deploy", "debian", "--to", "one,had")
        self.assertThat(
            said, Contains("1 of 2 hosts had all of debian before, and are left out\none had 25% of it when")
        )
        self.assertThat(said, Contains("\norigin sent 3M\n"))
        self.assertThat(said, Contains("unicast, 1 at a time: 1 of 1 in 2.00 s\n"))

    def test_a_host_that_fails_is_named(self) -> None:
        failed = self.deployment(2, one=TransferState.LOST, two=WHOLE)
        self.follow(self.deployment(0, one=WAITING, two=WAITING), failed)
        said = self.run_virtman("bench", "deploy", "debian", "--all", code=1).stdout
        self.assertThat(said, Contains("1 of 2 in 2.00 s\n  one: lost\n"))

    def test_if_nothing_would_travel_it_says_what_to_do(self) -> None:
        self.follow(self.deployment(0, had=WAITING))
        self.assertThat(self.fails("bench", "deploy", "debian", "--all"), Contains("virtman hydrate debian --cancel"))

    def test_without_a_place_it_is_misuse(self) -> None:
        deploy = self.follow(self.deployment(0, one=WAITING))
        self.misused("bench", "deploy", "debian")
        deploy.assert_not_called()


class BenchReportTest(AgentCliTest):
    def result(self, host: str, kind: str = "boot", label: str = "1 at a time", seconds: float = 1.0) -> Path:
        stage = "guest" if kind == "boot" else "filling"
        runs = [{"name": "vm", "seconds": {stage: seconds}}]
        made = {"kind": kind, "image": "debian", "host": host, "begun": "2026-01-01T00:00:00Z"}
        path = self.socket.parent / f"{host}-{kind}.json"
        path.write_text(json.dumps(made | {"rounds": [{"label": label, "runs": runs}]}))
        return path

    def test_results_are_put_together(self) -> None:
        folder = self.socket.parent / "both"
        said = self.out("bench", "report", self.result("a"), self.result("b", seconds=3), "--out", folder)
        self.assertThat(said, Contains("1 at a time: 2 of 2 in 3.00 s\n"))
        self.assertThat((folder / "plot.svg").read_text(), Contains("b: vm"))
        methods = [self.result("a", "deploy", "tree", 2), self.result("b", "deploy", "lazy", 9)]
        self.assertThat(self.out("bench", "report", *methods), Contains("fastest: tree\n"))

    def test_what_cannot_be_put_together_fails_in_one_line(self) -> None:
        self.assertThat(self.fails("bench", "report", self.result("a"), self.result("a", "deploy")), Contains("kind"))
        other = self.socket.parent / "other"
        other.write_text("{}")
        self.assertThat(self.fails("bench", "report", other), Contains("other is no result of virtman bench"))
        self.misused("bench", "report")
