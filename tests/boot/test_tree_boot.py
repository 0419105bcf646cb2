"""Whole VMs boot through libvirt and QEMU from a tree of hosts."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import libvirt

from lab.cluster import Cluster
from lab.login import io_errors, wait_login
from lab.process import processes_of
from tests.boot.vms import LOGIN_TIMEOUT, VmTestCase


class TreeBootTest(VmTestCase):
    def boot(self, cluster: Cluster, host: int, vm: str) -> dict[str, Any]:
        """Start a VM."""
        return cluster.agents[host].boot(vm, "guest", memory=256, network="none")

    def image(self, cluster: Cluster, host: int) -> dict[str, Any]:
        """What a host says of the image."""
        [image] = cluster.agents[host].status()["images"]
        return dict(image)

    def daemons(self, cluster: Cluster, host: int) -> list[int]:
        """The storage daemons of a host."""
        found = processes_of(cluster.run_folder(host))
        return [pid for pid, line in found.items() if line.startswith("qemu-storage-daemon")]

    def test_vms_of_all_hosts_boot_and_each_host_fetches_the_same_bytes_once(self) -> None:
        cluster = self.cluster(4)
        for host in (1, 2, 3):
            cluster.agents[host].create(f"place-{host}", "guest")
        with ThreadPoolExecutor(2) as pool:
            started = list(pool.map(lambda vm: self.boot(cluster, *vm), [(3, "vm-a"), (3, "vm-b")]))
        for vm, answer in zip(("vm-a", "vm-b"), started, strict=True):
            wait_login(vm, Path(answer["console_log"]), LOGIN_TIMEOUT)
            self.assertEqual(0, io_errors(Path(answer["console_log"])))
        fetched = self.image(cluster, 3)["fetched_bytes"]
        self.assertGreater(fetched, 10_000_000)
        self.assertLess(fetched, 100_000_000)
        # Host 3 is a child of host 1, which fetched what it passed on and nothing else.
        self.assertEqual(fetched, self.image(cluster, 1)["fetched_bytes"])
        self.assertEqual(0, self.image(cluster, 2)["fetched_bytes"])

    def test_a_vm_boots_while_the_storage_daemons_and_agents_on_its_way_are_killed(self) -> None:
        cluster = self.cluster(3)
        answer = self.boot(cluster, 1, "survivor")
        console = Path(answer["console_log"])
        wait_for_text(console, b"SYSLINUX")
        for pid in self.daemons(cluster, 1):
            os.kill(pid, signal.SIGKILL)  # the agent starts it again
        wait_login("survivor", console, LOGIN_TIMEOUT)
        cluster.kill_agent(1)
        cluster.stop_volt()
        cluster.start_agent(1)
        states = {vm["vm"]: vm["state"] for vm in cluster.agents[1].vms()}
        self.assertEqual({"survivor": "running"}, states)
        self.assertEqual(0, io_errors(console))
        cluster.start_volt()

    def test_a_vm_shuts_down_when_asked_and_boots_again_with_its_writes(self) -> None:
        cluster = self.cluster(2)
        answer = self.boot(cluster, 1, "again")
        wait_login("again", Path(answer["console_log"]), LOGIN_TIMEOUT)
        cluster.agents[1].stop("again")
        written = Path(answer["path"]).stat().st_size
        self.assertEqual(["off"], [vm["state"] for vm in cluster.agents[1].vms()])
        answer = self.boot(cluster, 1, "again")
        wait_login("again", Path(answer["console_log"]), LOGIN_TIMEOUT)
        self.assertGreaterEqual(Path(answer["path"]).stat().st_size, written)

    def test_destroy_of_a_running_vm_leaves_no_domain_and_no_disk(self) -> None:
        cluster = self.cluster(2)
        answer = self.boot(cluster, 1, "gone")
        console = cluster.agents[1].console("gone")
        cluster.agents[1].destroy("gone")
        connection = libvirt.open(console["libvirt"])
        self.addCleanup(connection.close)
        self.assertEqual([], connection.listAllDomains())
        for path in (answer["path"], answer["console_log"]):
            self.assertFalse(Path(path).exists(), path)


def wait_for_text(console: Path, text: bytes) -> None:
    """Wait until the console has printed something."""
    from lab.process import attempts

    for _ in attempts(LOGIN_TIMEOUT):
        if text in console.read_bytes():
            return
    raise AssertionError(f"{console} never had {text!r}")
