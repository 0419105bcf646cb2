"""kill -9 of the agent at steps of an operation; then a start repairs everything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.patience import wait_until
from tests.programs import qemu_io
from tests.sweeps import kills
from tests.userspace.hosts import Act, HostProcess, HostsTestCase
from virtman.client import AgentClient
from virtman.errors import UnknownVm


def nothing(_client: AgentClient) -> None:
    """No preparation."""


class KilledTestCase(HostsTestCase):
    """One origin, and hosts whose agents are killed."""

    def setUp(self) -> None:
        super().setUp()
        self.file = self.image_file()
        self.host("origin").start().publish("img", self.file)

    def steps_of(self, act: Act, before: Act = nothing) -> list[str]:
        """The steps of an act on a new host, in order."""
        host = self.host("dry-run")
        before(host.start())
        steps = host.steps_of(act)
        host.tear_down()
        self.assertTrue(steps)
        return steps

    def interrupt(self, host: HostProcess, step: str, act: Act, before: Act = nothing) -> AgentClient:
        """Have the agent of a new host killed at ``step`` of ``act``, and the next one repair what it left."""
        before(host.start())
        return self.killed(host, step, act)

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
        allowed |= {f"serve/{image}.sock" for image in images}
        found = sorted(host.files() - allowed)
        if set(images) != host.served():
            found.append(f"the images {images}, and {host.served()} are served")
        waiting = [client.tree("img").root]
        for node in waiting:
            waiting.extend(node.children)
        if bool(images) != (host.name in {node.host for node in waiting}):
            found.append(f"images {images}, and the tree {[node.host for node in waiting]}")
        return found


class AgentKilledTest(KilledTestCase):
    """A new host for every kill, so that each create begins with an attach."""

    def test_create_killed_anywhere_leaves_nothing_and_works_again(self) -> None:
        def create(client: AgentClient) -> None:
            client.create("vm", "img")

        for number, step in enumerate(kills(self.steps_of(create))):
            host = self.host(f"h{number}")
            client = self.interrupt(host, step, create)
            self.assert_nothing_left_over(host, client)
            self.assert_same_content(Path(client.create("vm", "img").disk.path), self.file)
            self.assert_nothing_left_over(host, client)
            client.destroy("vm")
            client.gc()
            self.assert_nothing_left_over(host, client)
            self.assertEqual(set(), host.served())
            host.tear_down()

    def test_destroy_killed_anywhere_is_finished_and_other_disks_stay(self) -> None:
        def two_vms(client: AgentClient) -> None:
            client.create("vm", "img")
            client.create("other", "img")

        def destroy(client: AgentClient) -> None:
            client.destroy("vm")

        for number, step in enumerate(kills(self.steps_of(destroy, two_vms))):
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

        for number, step in enumerate(kills(self.steps_of(AgentClient.gc, stack_without_vm))):
            host = self.host(f"h{number}")
            client = self.interrupt(host, step, AgentClient.gc, stack_without_vm)
            self.assert_nothing_left_over(host, client)
            self.assert_same_content(Path(client.create("vm", "img").disk.path), self.file)
            host.tear_down()


class DiskKilledTest(KilledTestCase):
    """A VM with two snapshots on one host, for every kill; 1, 2 and then 3 was written to its first 4 KiB."""

    def setUp(self) -> None:
        super().setUp()
        self.h1 = self.host("h1")
        self.h1.start().create("keeps-the-image", "img")

    def with_snapshots(self, client: AgentClient) -> None:
        client.create("vm", "img")
        for number, name in enumerate(("one", "two"), 1):
            self.write(client, number)
            client.take_snapshot("vm", name)
        self.write(client, 3)

    def write(self, client: AgentClient, pattern: int) -> None:
        qemu_io(client.vm("vm").disk.path, f"write -P {pattern} 0 4k")

    def assert_holds(self, client: AgentClient, vm: str, pattern: int) -> None:
        """Also all that was not written reads as the image."""
        qemu_io(client.vm(vm).disk.path, f"read -P {pattern} 0 4k")
        expected = bytes([pattern]) * 4096 + self.file.read_bytes()[4096:]
        (self.folder / "expected").write_bytes(expected.ljust(client.vm(vm).disk.size or 0, b"\0"))
        self.assert_same_content(Path(client.vm(vm).disk.path), self.folder / "expected")

    def killed_anywhere(self, act: Act) -> Iterator[AgentClient]:
        """A client after each kill and repair; the VM is destroyed afterwards, and nothing is left of it."""
        client = self.h1.client()
        self.with_snapshots(client)
        steps = self.h1.steps_of(act)
        self.assertTrue(steps)
        for step in kills(steps):
            self.destroy_all(client)
            self.with_snapshots(client)
            client = self.killed(self.h1, step, act)
            yield client
            self.assert_nothing_left_over(self.h1, client)
        self.destroy_all(client)
        self.assert_nothing_left_over(self.h1, client)

    def destroy_all(self, client: AgentClient) -> None:
        for vm in client.vms():
            if vm.name != "keeps-the-image":
                client.destroy(vm.name)
        self.assertEqual(["keeps-the-image"], [path.name for path in (self.h1.state / "snapshots").glob("[!.]*")])

    def test_going_back(self) -> None:
        def revert(client: AgentClient) -> None:
            client.revert("vm", "one")

        for client in self.killed_anywhere(revert):
            self.assert_holds(client, "vm", 1)  # once it is written down it is finished
            revert(client)
            self.assert_holds(client, "vm", 1)
            self.assertEqual(["one"], [one.name for one in client.snapshots("vm") if one.current])

    def test_cloning(self) -> None:
        for client in self.killed_anywhere(lambda client: client.clone("vm", ["new-1", "new-2"])):
            clones = client.clone("vm", ["new-1", "new-2"])
            self.assertEqual(["one", "two"], [one.name for one in client.snapshots("vm")])
            client.destroy("vm")
            for clone in clones:
                self.assert_holds(client, clone.name, 3)
