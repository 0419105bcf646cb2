"""Hosts in a tree: one copy per host, deaths, a coordinator that is away, many calls at once, bad input."""

from __future__ import annotations

import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.process import processes_of
from tests.patience import wait_until
from tests.programs import qemu_io
from tests.userspace.hosts import HostProcess, HostsTestCase
from virtman import errors
from virtman.client import AgentClient
from virtman.models import Stack
from volt.client import ImageTree


def read(disk: str, offset: int, length: int) -> None:
    """Read a range of a VM's disk, as a QEMU would."""
    qemu_io(disk, f"read {offset} {length}", options=["-r", "-f", "qcow2"])


def image_of(client: AgentClient, name: str = "img") -> Stack:
    """The status of one image on a host."""
    return next(image for image in client.status().images if image.name == name)


def wait_fetched(client: AgentClient, size: int, name: str = "img") -> None:
    """Wait until a host has so many bytes of an image: readers get them a moment before they are kept."""
    wait_until(lambda: image_of(client, name).fetched_bytes == size, f"{size} bytes of {name} are fetched")


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
    volt_options = (*ClusterTestCase.volt_options, "--fanout", "1")

    def test_each_range_crosses_a_link_once_for_all_vms_and_volt_knows_the_bytes_of_each_host(self) -> None:
        # Each host is a child of the one before, which so fetches what the child reads, also if another parent is asked
        # because that one is late.
        hosts = self.hosts(3)
        for mib, (_, client) in zip((1, 3, 2), hosts, strict=True):
            for vm in ("a", "b"):
                read(client.create(vm, "img").disk.path, 0, mib << 20)
        expected = {"h1": 3 << 20, "h2": 3 << 20, "h3": 2 << 20}
        for host, client in hosts:
            wait_fetched(client, expected[host.name])
        volt = self.volt.client()
        wait_until(lambda: _bytes(volt.tree("img")) == expected, "Volt knows the bytes of all hosts")
        for _, client in hosts:
            for vm in ("a", "b"):
                self.assert_same_content(Path(client.vm(vm).disk.path), self.file)


def _bytes(tree: ImageTree) -> dict[str, int]:
    waiting = list(tree.root.children)
    for node in waiting:
        waiting.extend(node.children)
    return {node.host: node.fetched_bytes for node in waiting}


class VoltAwayTest(ClusterTestCase):
    def test_attached_images_serve_new_vms_while_volt_is_down_and_all_agree_afterwards(self) -> None:
        [(host, client)] = self.hosts(1)
        read(client.create("before", "img").disk.path, 0, 1 << 20)
        self.volt.stop()
        self.assertRaises(errors.CoordinatorDown, client.create, "vm", "other")
        host.kill()
        host.kill_daemons()
        client = host.start()
        client.repair()
        read(client.create("during", "img").disk.path, 0, 1 << 20)
        wait_fetched(client, 1 << 20)
        client.destroy("before")
        self.assertEqual((["during"], 1), ([vm.name for vm in client.vms()], len(host.daemons())))
        self.volt.start()
        wait_until(lambda: client.status().volt.connected, "the agent is connected again")
        self.assertEqual(["h1"], [node.host for node in self.volt.client().tree("img").root.children])
        self.assert_same_content(Path(client.vm("during").disk.path), self.file)


class DaemonEndsTest(ClusterTestCase):
    def test_what_was_fetched_outlives_a_killed_daemon_and_a_suspended_host(self) -> None:
        [(host, client)] = self.hosts(1)
        disk = client.create("vm", "img").disk.path
        read(disk, 0, 1 << 20)
        host.kill_daemons()
        read(disk, 0, 2 << 20)
        wait_fetched(client, 2 << 20)
        client.suspend()
        self.assertEqual({}, host.daemons())
        host.stop()
        client = host.start()
        client.repair()
        wait_fetched(client, 2 << 20)
        self.assert_same_content(Path(disk), self.file)


class SecretsTest(ClusterTestCase):
    def test_they_are_in_no_command_line_no_log_and_no_file_that_others_may_read(self) -> None:
        [(host, client)] = self.hosts(1)
        read(client.create("vm", "img").disk.path, 0, 1 << 20)
        records = [
            path.read_text() for each in (self.origin, host) for path in each.state.glob("records/images/*.json")
        ]
        secrets = set(re.findall(r'"(?:serving_key|secret|ticket)": ?"(\w+)"', "".join(records)))
        self.assertEqual(4, len(secrets), "two serving keys, an edge's secret and a ticket")
        files = [path for path in self.folder.rglob("*") if stat.S_ISREG(path.lstat().st_mode)]
        shown = [path for path in files if path.stat().st_mode & stat.S_IROTH or path.suffix == ".log"]
        self.assertLessEqual({"volt.log", "chunkd.log"}, {path.name for path in shown})
        texts = {str(path): path.read_bytes() for path in shown}
        texts |= {line: line.encode() for line in processes_of(self.folder).values()}
        for secret in secrets:
            told = [where for where, text in texts.items() if secret.encode() in text or bytes.fromhex(secret) in text]
            self.assertEqual([], told)
