"""kill -9 of the agent at every step of create, destroy and gc; then a start repairs everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.userspace.hosts import HostProcess, HostsTestCase, wait_until
from virtman.client import AgentClient
from virtman.errors import AgentUnreachable, UnknownVm

Act = Callable[[AgentClient], object]


def nothing(_client: AgentClient) -> None:
    """No preparation."""


class AgentKilledTest(HostsTestCase):
    """One origin; a new host for every kill, so that each create begins with an attach."""

    def setUp(self) -> None:
        super().setUp()
        self.file = self.image_file()
        self.host("origin").start().publish("img", self.file)

    def steps_of(self, act: Act, before: Act = nothing) -> list[str]:
        """The steps of an act on a new host, in order."""
        host = self.host("dry-run")
        client = host.start()
        before(client)
        reached = len(host.steps())
        act(client)
        steps = host.steps()[reached:]
        host.tear_down()
        self.assertTrue(steps)
        return list(dict.fromkeys(steps))

    def interrupt(self, host: HostProcess, step: str, act: Act, before: Act = nothing) -> AgentClient:
        """Kill the agent at ``step`` of ``act``, start it again, and have it repair."""
        first = host.start()
        before(first)
        host.stop()
        client = host.start(die_at=step)
        self.assertRaises(AgentUnreachable, act, client)
        host.wait_dead()
        client = host.start()
        client.repair()
        return client

    def assert_nothing_left_over(self, host: HostProcess, client: AgentClient) -> None:
        """What is on the host is what the agent says it has, as soon as no record is being written."""
        try:
            wait_until(lambda: self.differences(host, client) == [], "the host is as the agent says")
        except AssertionError:
            self.assertEqual([], self.differences(host, client))

    def differences(self, host: HostProcess, client: AgentClient) -> list[str]:
        """What is on the host, or at Volt, and should not be, or the other way round."""
        images = [image.name for image in client.status().images]
        vms = [vm.name for vm in client.vms()]
        allowed = {f"vms/{vm}.json" for vm in vms} | {f"images/{image}.json" for image in images}
        allowed |= {f"snapshots/{vm}" for vm in vms}
        allowed |= {f"serve/{image}.{kind}" for image in images for kind in ("sock", "pid", "log")}
        left = {file for file in host.files() if not any(file.startswith(f"parent/{image}.") for image in images)}
        found = sorted(left - allowed)
        if len(images) != len(host.daemons()):
            found.append(f"{len(images)} images, and the daemons {host.daemons()}")
        waiting = [client.tree("img").root]
        for node in waiting:
            waiting.extend(node.children)
        if bool(images) != (host.name in {node.host for node in waiting}):
            found.append(f"images {images}, and the tree {[node.host for node in waiting]}")
        return found

    def test_create_killed_anywhere_leaves_nothing_and_works_again(self) -> None:
        def create(client: AgentClient) -> None:
            client.create("vm", "img")

        for number, step in enumerate(self.steps_of(create)):
            host = self.host(f"h{number}")
            client = self.interrupt(host, step, create)
            self.assert_nothing_left_over(host, client)
            self.assert_same_content(Path(client.create("vm", "img").disk.path), self.file)
            self.assert_nothing_left_over(host, client)
            client.destroy("vm")
            client.gc()
            self.assert_nothing_left_over(host, client)
            self.assertEqual({}, host.daemons())
            host.tear_down()

    def test_destroy_killed_anywhere_is_finished_and_other_disks_stay(self) -> None:
        def two_vms(client: AgentClient) -> None:
            client.create("vm", "img")
            client.create("other", "img")

        def destroy(client: AgentClient) -> None:
            client.destroy("vm")

        for number, step in enumerate(self.steps_of(destroy, two_vms)):
            host = self.host(f"h{number}")
            client = self.interrupt(host, step, destroy, two_vms)
            self.assert_nothing_left_over(host, client)
            self.assertRaises(UnknownVm, client.destroy, "vm")
            self.assert_same_content(Path(client.vm("other").disk.path), self.file)
            host.tear_down()

    def test_gc_killed_anywhere_leaves_a_whole_stack_or_none(self) -> None:
        def stack_without_vm(client: AgentClient) -> None:
            client.create("vm", "img")
            client.destroy("vm")

        for number, step in enumerate(self.steps_of(AgentClient.gc, stack_without_vm)):
            host = self.host(f"h{number}")
            client = self.interrupt(host, step, AgentClient.gc, stack_without_vm)
            self.assert_nothing_left_over(host, client)
            self.assert_same_content(Path(client.create("vm", "img").disk.path), self.file)
            host.tear_down()
