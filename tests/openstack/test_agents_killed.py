"""kill -9 of the agent at each step that it takes for Nova, and of Volt; slow agents; answers that are lost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.cluster import Cluster
from tests.openstack.agreement import AgreeingTest
from tests.openstack.cinder import nobody_listens
from tests.patience import PATIENCE


class AgentKilledTest(AgreeingTest):
    """All servers come to one host, whose agent is killed."""

    def begin_cluster(self) -> None:
        self.make_folder()
        self.orders = self.folder / "orders"
        self.orders.mkdir()
        program: list[str | Path] = [sys.executable, "-m", "tests.openstack.stepping_agent", self.orders]
        (self.orders / "host-1.steps").touch()
        self.start_cluster(Cluster(self.folder / "cluster", self.COMPUTES, agent=program))
        self.node = self.cluster.names[1]

    def boot_here(self, **more: Any) -> dict[str, Any]:
        """Have a server made, which then is active or in error."""
        server = self.api.post_server({"server": self.request(availability_zone=f"nova:{self.node}", **more)})
        self.soon(lambda: self.api.get_server(server["id"])["status"] in ("ACTIVE", "ERROR"))
        return self.api.get_server(server["id"])

    def steps(self) -> list[str]:
        """What the agent has come by."""
        return (self.orders / f"{self.node}.steps").read_text().splitlines()

    def steps_of(self, act: Callable[[], object]) -> list[str]:
        """What the agent comes by, once each, during an act."""
        before = len(self.steps())
        act()
        return list(dict.fromkeys(self.steps()[before:]))

    def killed_at(self, steps: list[str], act: Callable[[], object]) -> Iterator[str]:
        """An act for steps, at which the agent is killed; it starts again, and all repair."""
        for step in steps:
            (self.orders / f"{self.node}.kill").write_text(step)
            act()
            self.cluster.kill_agent(1)
            self.cluster.restart_agent(1)
            (self.orders / f"{self.node}.kill").unlink(missing_ok=True)
            self.repair()
            yield step

    def assert_whole(self, said: str = "") -> None:
        """Servers are active and have their disk, or are in error; they can be deleted, and leave nothing."""
        for server in self.api.get_servers(detail=True):
            self.assertIn(server["status"], ("ACTIVE", "ERROR"), said)
            if server["status"] == "ACTIVE":
                self.assertIn(server["id"], self.disks(self.node), said)
            self.delete(server)
        self.assert_agreement(said)

    def test_while_it_attaches_a_base_and_makes_a_disk(self) -> None:
        steps = self.steps_of(self.boot_here)
        self.assertGreater(len(steps), 5)
        self.assert_whole()
        self.let_go()
        for step in self.killed_at(steps, self.boot_here):
            self.assert_whole(step)
            self.let_go()

    def test_while_it_destroys_a_disk(self) -> None:
        server = self.boot_here()
        steps = self.steps_of(lambda: self.delete(server))
        self.assertGreater(len(steps), 1)
        for step in self.killed_at(steps, lambda: self.delete(self.boot_here())):
            self.assert_agreement(step)

    def test_one_that_answers_too_late_leaves_nothing(self) -> None:
        self.delete(self.boot_here())
        steps = self.steps_of(self.boot_here)
        self.assert_whole()
        hold = self.orders / f"{self.node}.hold"
        for step in (steps[0], steps[-1]):
            hold.write_text(step)
            self.flags(agent_timeout=1, group="virtman")
            server = self.boot_here()
            self.assertEqual("ERROR", server["status"])
            self.delete(server)
            hold.unlink()
            self.flags(agent_timeout=600, group="virtman")
            self.assert_agreement(step)


class VoltKilledTest(AgreeingTest):
    """Many servers at once."""

    def test_during_a_wave(self) -> None:
        self.boot()
        self.api.post_server({"server": self.request(min_count=8, max_count=8)})
        self.soon(lambda: sum(len(self.agent(node).vms()) for node in self.cluster.names) > 2)
        self.cluster.kill_volt()
        self.soon(lambda: {one["status"] for one in self.api.get_servers(detail=True)} <= {"ACTIVE", "ERROR"})
        self.cluster.start_volt()
        self.repair()
        active = {one["id"] for one in self.api.get_servers(detail=True) if one["status"] == "ACTIVE"}
        self.assertEqual(active, active & {*self.all_disks()})
        for server in self.api.get_servers():
            self.delete(server)
        self.assert_agreement()


class CinderTest(AgreeingTest):
    """Answers that are lost, and two hosts at once."""

    def here(self, number: int) -> dict[str, Any]:
        """Have a server made at this host."""
        return {"availability_zone": f"nova:{self.cluster.names[number]}"}

    def lose_the_answer(self, call: str) -> None:
        """The next call of this name is carried out, and fails for the caller."""

        def step(name: str) -> None:
            if name == f"after {call}":
                self.cinder.step = nobody_listens
                raise self.unreachable()

        self.cinder.step = step

    def test_an_answer_that_is_lost_when_a_base_is_attached_leaves_it_to_others(self) -> None:
        for call in ("attachment_create", "attachment_complete"):
            self.lose_the_answer(call)
            self.boot(state="ERROR", **self.here(0))
            self.repair()
            self.assertEqual({}, self.cinder.attachments)
            self.boot(**self.here(1))
            for server in self.api.get_servers():
                self.delete(server)
            self.let_go()

    def test_two_hosts_that_attach_a_base_at_the_same_moment(self) -> None:
        self.flags(origin=True, group="virtman")
        for several in (False, True):
            self.cinder.volumes[self.volume]["multiattach"] = several
            self.cinder.step = together("before attachment_create", 2)
            asked = [self.api.post_server({"server": self.request(**self.here(number))}) for number in range(2)]
            for server in asked:
                self.until(server, "ACTIVE")
            self.cinder.step = nobody_listens
            self.repair()
            self.assertEqual(1, len(self.images()[self.image()]))
            for server in asked:
                self.delete(server)
            self.assert_agreement()
            self.let_go()


def together(step: str, count: int) -> Callable[[str], None]:
    """Hold those that come to a step until there are so many."""
    all_there = threading.Barrier(count)

    def wait(name: str) -> None:
        if name == step and not met:
            all_there.wait(PATIENCE)
            met.append(name)

    met: list[str] = []
    return wait
