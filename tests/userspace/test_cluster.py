"""Hosts in a tree: one copy per host, deaths, a coordinator that is away, many calls at once, bad input."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.userspace.hosts import HostProcess, HostsTestCase, wait_until
from virtman import errors
from virtman.client import AgentClient
from virtman.models import Stack
from volt.client import ImageTree

CLUSTER = 64 << 10


def read(disk: str, offset: int, length: int) -> None:
    """Read a range of a VM's disk, as a QEMU would."""
    subprocess.run(
        ["qemu-io", "-r", "-f", "qcow2", "-c", f"read {offset} {length}", disk], check=True, capture_output=True
    )


def image_of(client: AgentClient, name: str = "img") -> Stack:
    """The status of one image on a host."""
    return next(image for image in client.status().images if image.name == name)


class ClusterTestCase(HostsTestCase):
    """An origin with one published image."""

    volt_options: tuple[str, ...] = ("--heartbeat", "0.5", "--lease", "60")

    def setUp(self) -> None:
        super().setUp()
        self.file = self.image_file()
        self.origin = self.host("origin")
        self.origin.start().publish("img", self.file)

    def hosts(self, count: int) -> list[tuple[HostProcess, AgentClient]]:
        """Hosts, started side by side."""
        hosts = [self.host(f"h{number}") for number in range(1, count + 1)]
        with ThreadPoolExecutor(count) as pool:
            return list(zip(hosts, pool.map(HostProcess.start, hosts), strict=True))


class OneCopyTest(ClusterTestCase):
    def test_every_vm_of_every_host_reads_the_image(self) -> None:
        for _, client in self.hosts(4):
            for vm in ("a", "b"):
                self.assert_same_content(Path(client.create(vm, "img").disk.path), self.file)

    def test_a_host_fetches_a_range_once_for_all_its_vms(self) -> None:
        [(_, client)] = self.hosts(1)
        for vm in ("a", "b", "c"):
            read(client.create(vm, "img").disk.path, 0, 1 << 20)
        self.assertEqual(1 << 20, image_of(client).fetched_bytes)

    def test_volt_shows_the_tree_with_the_bytes_of_each_host(self) -> None:
        for number, (_, client) in enumerate(self.hosts(3), 1):
            read(client.create("vm", "img").disk.path, 0, number << 20)
        volt = self.volt.client()
        # The third host is a child of the first, which so fetches what the third reads.
        expected = {"h1": 3 << 20, "h2": 2 << 20, "h3": 3 << 20}
        wait_until(lambda: _bytes(volt.tree("img")) == expected, "Volt knows the bytes of all hosts")

    def test_a_grandchild_reads_through_its_parent(self) -> None:
        hosts = self.hosts(3)
        clients = {host.name: client for host, client in hosts}
        for client in clients.values():
            client.create("vm", "img")
        tree = self.volt.client().tree("img")
        parent = next(node for node in tree.root.children if node.children)
        child = parent.children[0].host
        read(clients[child].vm("vm").disk.path, 0, 1 << 20)
        self.assertEqual(1 << 20, image_of(clients[child]).fetched_bytes)
        self.assertEqual(1 << 20, image_of(clients[parent.host]).fetched_bytes)


def _bytes(tree: ImageTree) -> dict[str, int]:
    waiting = list(tree.root.children)
    for node in waiting:
        waiting.extend(node.children)
    return {node.host: node.fetched_bytes for node in waiting}


class VoltAwayTest(ClusterTestCase):
    def test_attached_images_serve_new_vms_while_volt_is_down_and_all_agree_afterwards(self) -> None:
        [(_, client)] = self.hosts(1)
        client.create("before", "img")
        self.volt.stop()
        self.assert_same_content(Path(client.create("during", "img").disk.path), self.file)
        client.destroy("before")
        self.volt.start()
        wait_until(lambda: client.status().volt.connected, "the agent is connected again")
        self.assertEqual(["h1"], [node.host for node in self.volt.client().tree("img").root.children])

    def test_an_image_that_is_not_here_needs_volt_and_leaves_nothing(self) -> None:
        [(host, client)] = self.hosts(1)
        self.volt.stop()
        self.assertRaises(errors.CoordinatorDown, client.create, "vm", "img")
        self.assertEqual([], client.vms())
        self.assertEqual({}, host.daemons())

    def test_an_agent_starts_and_serves_without_volt(self) -> None:
        [(host, client)] = self.hosts(1)
        read(client.create("vm", "img").disk.path, 0, 1 << 20)
        host.kill()
        host.kill_daemons()
        self.volt.stop()
        client = host.start()
        client.repair()
        read(client.create("vm2", "img").disk.path, 0, 1 << 20)
        self.assertEqual(1 << 20, image_of(client).fetched_bytes)


class LeaseTest(ClusterTestCase):
    volt_options = ("--heartbeat", "0.5", "--lease", "3")

    def test_a_host_whose_lease_ran_out_is_taken_back(self) -> None:
        [(host, client)] = self.hosts(1)
        client.create("vm", "img")
        host.kill()
        volt = self.volt.client()
        wait_until(lambda: not volt.tree("img").root.children, "the lease ran out")
        client = host.start()
        wait_until(lambda: bool(volt.tree("img").root.children), "the host is in the tree again")
        self.assert_same_content(Path(client.vm("vm").disk.path), self.file)


class DaemonKilledTest(ClusterTestCase):
    def test_the_agent_starts_a_killed_daemon_again_and_keeps_what_was_fetched(self) -> None:
        [(host, client)] = self.hosts(1)
        disk = client.create("vm", "img").disk.path
        read(disk, 0, 1 << 20)
        self.assertEqual(1 << 20, image_of(client).fetched_bytes)
        host.kill_daemons()
        read(disk, 0, 2 << 20)
        self.assertEqual(2 << 20, image_of(client).fetched_bytes)
        self.assert_same_content(Path(disk), self.file)

    def test_suspend_stops_all_daemons_and_a_start_brings_them_back(self) -> None:
        [(host, client)] = self.hosts(1)
        disk = client.create("vm", "img").disk.path
        read(disk, 0, 1 << 20)
        client.suspend()
        self.assertEqual({}, host.daemons())
        host.stop()
        client = host.start()
        client.repair()
        self.assertEqual(1 << 20, image_of(client).fetched_bytes)
        self.assert_same_content(Path(disk), self.file)


class ManyAtOnceTest(ClusterTestCase):
    def test_fifty_creates_of_five_images_make_one_daemon_per_image(self) -> None:
        origin = self.origin.client()
        for number in range(5):
            origin.publish(f"img{number}", self.image_file(f"i{number}", 1 << 20))
        [(host, client)] = self.hosts(1)
        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(lambda n: client.create(f"vm{n}", f"img{n % 5}"), range(50)))
        self.assertEqual(50, len({answer.disk.path for answer in answers}))
        self.assertEqual(5, len(host.daemons()))

    def test_one_content_under_two_names_serves_both_on_one_host(self) -> None:
        self.origin.client().publish("alias", self.file)
        [(_, client)] = self.hosts(1)
        for image in ("img", "alias"):
            self.assert_same_content(Path(client.create(f"vm-{image}", image).disk.path), self.file)

    def test_the_same_vm_asked_for_ten_times_at_once_is_one_vm(self) -> None:
        [(_, client)] = self.hosts(1)
        with ThreadPoolExecutor(10) as pool:
            paths = {answer.disk.path for answer in pool.map(lambda _: client.create("vm", "img"), range(10))}
        self.assertEqual(1, len(paths))
        self.assertEqual(["vm"], [vm.name for vm in client.vms()])


class BadInputTest(ClusterTestCase):
    def setUp(self) -> None:
        super().setUp()
        [(self.victim, self.client)] = self.hosts(1)

    def assert_nothing_changed(self) -> None:
        """No VM, no stack, no file."""
        self.assertEqual([], self.client.vms())
        self.assertEqual({}, self.victim.daemons())
        self.assertEqual(set(), self.victim.files())

    def test_bad_names_are_refused(self) -> None:
        for name in ("a/b", "..", "a.b", "", "x" * 300, "-a", "a b", "ä"):
            self.assertRaises(errors.BadRequest, self.client.create, name, "img")
            self.assertRaises(errors.BadRequest, self.client.create, "vm", name)
        self.assert_nothing_changed()

    def test_an_unknown_image_is_refused(self) -> None:
        self.assertRaises(errors.UnknownImage, self.client.create, "vm", "other")
        self.assert_nothing_changed()

    def test_a_disk_smaller_than_its_image_is_refused(self) -> None:
        self.assertRaises(errors.BadSize, self.client.create, "vm", "img", 1 << 20)
        wait_until(lambda: not self.victim.daemons(), "the stack made for it is gone")
        self.assert_nothing_changed()

    def test_a_name_in_use_by_another_image_is_refused(self) -> None:
        self.origin.client().publish("img2", self.image_file("i2", 1 << 20))
        self.client.create("vm", "img")
        self.assertRaises(errors.VmExists, self.client.create, "vm", "img2")

    def test_other_content_under_a_published_name_is_refused(self) -> None:
        before = self.origin.files()
        self.assertRaises(errors.ImageExists, self.origin.client().publish, "img", self.image_file("other"))
        self.assertEqual(before, self.origin.files())
        self.assertEqual(1, len(list((self.origin.state / "images").iterdir())))

    def test_a_second_agent_on_the_same_folders_does_not_start(self) -> None:
        second = HostProcess("second", self.folder, self.volt.url)
        second.state, second.run = self.victim.state, self.victim.run
        self.assertIn("another agent is running", second.start_refused())
        self.client.status()
