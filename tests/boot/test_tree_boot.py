"""Whole VMs boot through libvirt and QEMU from a tree of hosts."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree as ET

import libvirt
import pytest

from lab.cluster import Cluster
from lab.guest import PARTITION_OFFSET
from lab.login import io_errors, wait_login
from lab.process import attempts, processes_of
from lab.tools import run
from tests.boot.vms import VmTestCase
from tests.patience import PATIENCE
from virtman import models
from virtman.errors import HypervisorError, VmRuns


class TreeBootTest(VmTestCase):
    def boot(self, cluster: Cluster, host: int, vm: str, network: str = "none") -> models.Booted:
        """Start a VM."""
        return cluster.agents[host].boot(vm, "guest", memory=256, network=network)

    def image(self, cluster: Cluster, host: int) -> models.Stack:
        """What a host says of the image."""
        [image] = cluster.agents[host].status().images
        return image

    def daemons(self, cluster: Cluster, host: int) -> list[int]:
        """The chunk store of a host."""
        found = processes_of(cluster.run_folder(host))
        return [pid for pid, line in found.items() if "virtman-chunkd" in line]

    def test_vms_of_all_hosts_boot_and_each_host_fetches_the_same_bytes_once(self) -> None:
        cluster = self.cluster(4)
        for host in (1, 2, 3):
            cluster.agents[host].create(f"place-{host}", "guest")
        with ThreadPoolExecutor(2) as pool:
            started = list(pool.map(lambda vm: self.boot(cluster, *vm), [(3, "vm-a"), (3, "vm-b")]))
        for vm, answer in zip(("vm-a", "vm-b"), started, strict=True):
            wait_login(vm, Path(answer.machine.console_log), PATIENCE)
            self.assertEqual(0, io_errors(Path(answer.machine.console_log)))
            cluster.agents[3].stop(vm, force=True)  # or it reads on while the hosts are asked, one after the other
        fetched = self.image(cluster, 3).fetched_bytes
        self.assertGreater(fetched, 10_000_000)
        self.assertLess(fetched, 100_000_000)
        # Host 3 is a child of host 1, which fetched what it passed on and nothing else. What came late was asked of
        # host 2 as well.
        passed = [self.image(cluster, host).fetched_bytes for host in (1, 2)]
        self.assertLessEqual(max(passed), fetched)
        self.assertGreaterEqual(sum(passed), fetched)

    @pytest.mark.long
    def test_a_vm_boots_while_the_chunk_store_and_agents_on_its_way_are_killed(self) -> None:
        cluster = self.cluster(3)
        answer = self.boot(cluster, 1, "survivor")
        console = Path(answer.machine.console_log)
        wait_for_text(console, b"SYSLINUX")
        for pid in self.daemons(cluster, 1):
            os.kill(pid, signal.SIGKILL)  # the agent starts it again
        wait_login("survivor", console, PATIENCE)
        cluster.kill_agent(1)
        cluster.stop_volt()
        cluster.start_agent(1)
        states = {vm.name: vm.state for vm in cluster.agents[1].vms()}
        self.assertEqual({"survivor": "running"}, states)
        self.assertEqual(0, io_errors(console))
        cluster.start_volt()

    def test_a_vm_shuts_down_when_asked_and_starts_again_with_its_writes_also_under_another_name(self) -> None:
        cluster = self.cluster(2)
        answer = self.boot(cluster, 1, "again", "user")
        wait_login("again", Path(answer.machine.console_log), PATIENCE)
        self.assertRaises(VmRuns, cluster.agents[1].rename, "again", "other")
        shut_down(cluster, "again")
        mounted = times_mounted(Path(answer.disk.path))
        self.assertGreater(mounted, 0)
        self.assertEqual(["off"], [vm.state for vm in cluster.agents[1].vms()])
        identity = self.identity(cluster, "again")
        cluster.agents[1].rename("again", "other")
        answer = cluster.agents[1].start("other")
        self.assertEqual(identity, self.identity(cluster, "other"))
        wait_login("again", Path(answer.machine.console_log), PATIENCE)  # the name in its seed
        shut_down(cluster, "other")
        self.assertGreater(times_mounted(Path(answer.disk.path)), mounted)
        self.assertEqual(["other"], [vm.name for vm in cluster.agents[1].vms()])

    def identity(self, cluster: Cluster, vm: str) -> tuple[str, list[str]]:
        """The UUID and MAC addresses of a VM; no other one is there."""
        connection = libvirt.open(cluster.agents[1].console(vm).libvirt)
        self.addCleanup(connection.close)
        [domain] = connection.listAllDomains()
        self.assertEqual(vm, domain.name())
        macs = ET.fromstring(domain.XMLDesc()).iterfind("devices/interface/mac")
        return domain.UUIDString(), [str(mac.get("address")) for mac in macs]


def shut_down(cluster: Cluster, vm: str, host: int = 1) -> None:
    """Shut a VM down, however slow it is."""
    for _ in attempts(PATIENCE):
        try:
            return cluster.agents[host].stop(vm)
        except HypervisorError as error:
            if "did not shut down within" not in str(error):
                raise
    raise AssertionError(f"{vm} does not shut down")


def times_mounted(disk: Path) -> int:
    """How often a VM that is off now has mounted its root: it counts there (Linux: fs/ext4/ext4.h, s_mnt_count)."""
    said = run(["qemu-io", "-r", "-f", "qcow2", "-c", f"read -v {PARTITION_OFFSET + 1024 + 0x34} 2", disk])
    low, high = said.split(":")[1].split()[:2]
    return int(high + low, 16)


def wait_for_text(console: Path, text: bytes) -> None:
    """Wait until the console has printed something."""
    for _ in attempts(PATIENCE):
        if text in console.read_bytes():
            return
    raise AssertionError(f"{console} never had {text!r}")
