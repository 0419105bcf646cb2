"""The demo of the kernel stack: a VM boots inside a host whose every layer is the kernel's own.

``python -m lab.kernel.demo [--hosts 3] [--suite trixie]`` boots guests with Debian's kernel, an origin and hosts. They
attach to an image at once; a VM boots in one that reads from another host, by libvirt and QEMU, from a thin volume over
bcache over multipath over LIO; then that host's parent loses its power while it reads. ``build/demo-kernel.json`` has
the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab.errors import LabError, LoginFailed
from lab.guest import add_suite
from lab.kernel.cluster import KernelCluster
from lab.kernel.footprint import footprint
from lab.kernel.machine import Machine
from lab.kernel.services import Services, agent
from lab.kernel.tinyvm import TinyVm, tiny_vm
from lab.present import at_least_one, present
from lab.process import attempts
from lab.view import View
from virtman.client import AgentClient
from virtman.models import Stack
from volt.text import size_text

IMAGE = "tiny"
VM, SECOND = "vm", "second"
BOOT_TIMEOUT = 1200.0
SETTLE_TIMEOUT = 120.0
"""Seconds; without a load all read from their parents at once."""
TEARDOWN_TIMEOUT = 60.0


class Demo:
    """One run on a cluster whose services are up."""

    def __init__(self, cluster: KernelCluster, agents: dict[str, AgentClient], tiny: TinyVm, view: View) -> None:
        self.origin = cluster.machines["origin"]
        self.hosts = [machine for name, machine in cluster.machines.items() if name != "origin"]
        self.agents, self.tiny, self.view = agents, tiny, view
        self.before = {machine.name: footprint(machine) for machine in cluster.machines.values()}

    def run(self) -> dict[str, Any]:
        """All of it. Returns what was measured; raises LabError."""
        self.view.phase("publishing the image on the origin")
        self.origin.run(["virtman", "publish", IMAGE, self.origin.send(self.tiny.disk, "/var/tmp")])
        attach_s = self.attach()
        child, parent = self.child_and_parent()
        figures = {"attach_s": attach_s, **self.boot(child), **self.lose_parent(child, parent)}
        self.view.phase("destroying the VMs, and all that was made for them")
        figures["left_over"] = self.remove()
        return figures

    def attach(self) -> float:
        """Every host makes a VM's disk at the same time. Returns the seconds until all have one."""
        self.view.phase(f"{len(self.hosts)} hosts attach at once")
        began = time.monotonic()
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            list(pool.map(lambda machine: self.agents[machine.name].create(VM, IMAGE), self.hosts))
        seconds = time.monotonic() - began
        self.view.say(self.origin.run(["virtman", "tree", IMAGE]))
        self.view.say(f"  all have their disk after {seconds:.1f} s")
        return seconds

    def boot(self, host: Machine) -> dict[str, Any]:
        """A VM, until it prints from user space."""
        self.view.phase(f"a VM boots in {host.name}, which is a VM itself")
        began = time.monotonic()
        log = self.agents[host.name].boot(VM, IMAGE, memory=128, network="none").machine.console_log
        for _ in attempts(BOOT_TIMEOUT):
            if self.tiny.line in host.run(["cat", log]):
                break
        else:
            raise LoginFailed(f"{VM} on {host.name} did not come up; its console: {host.run(['tail', log])}")
        seconds, fetched = time.monotonic() - began, self.status(host).fetched_bytes
        self.view.say(f"  it says, after {seconds:.0f} s: {self.tiny.line}")
        self.view.say(f"  fetched {size_text(fetched)} of {size_text(self.tiny.disk.stat().st_size)}")
        return {"boot_s": seconds, "fetched_bytes": fetched}

    def lose_parent(self, child: Machine, parent: Machine) -> dict[str, Any]:
        """Take the power of a host's parent while the host reads the whole image. Raises LabError for a wrong byte."""
        self.view.phase(f"{parent.name} loses its power while {child.name} reads the image through it")
        reading = child.begin(["sha256sum", self.agents[child.name].create(SECOND, IMAGE).disk.path])
        parent.cut_power()
        self.hosts.remove(parent)
        said = reading.communicate(timeout=BOOT_TIMEOUT)[0].split()
        if said[:1] != [sha256(self.tiny.disk)]:
            raise LabError(f"{child.name} read {said} after {parent.name} was gone")
        now = self.active_parent(child)
        self.view.say(f"  every byte is right; {child.name} reads from {now} now")
        return {"lost": parent.name, "reads_from": now}

    def child_and_parent(self) -> tuple[Machine, Machine]:
        """Two hosts of which one reads from the other. Raises LabError."""
        by_name = {machine.name: machine for machine in self.hosts}
        for _ in attempts(SETTLE_TIMEOUT):
            parents = {child.name: self.active_parent(child) for child in self.hosts}
            for child, parent in parents.items():
                if parent in by_name:
                    return by_name[child], by_name[parent]
        raise LabError(f"no host reads from another host: take more of them ({parents})")

    def active_parent(self, host: Machine) -> str:
        """The name of who a host reads from now."""
        return next((path.host for path in self.status(host).paths if path.state == "active"), "nobody")

    def status(self, host: Machine) -> Stack:
        """What a host says of the image."""
        [image] = self.agents[host.name].status().images
        return image

    def remove(self) -> dict[str, Any]:
        """Remove all by the commands for it. Returns what is left on the hosts that have power: nothing."""
        for host in reversed(self.hosts):
            for vm in self.agents[host.name].vms():
                self.agents[host.name].destroy(vm.name)
        self.collect()
        left = {}
        for host in self.hosts:
            now = footprint(host)
            if now != self.before[host.name]:
                left[host.name] = {kind: found for kind, found in now.items() if found != self.before[host.name][kind]}
        self.view.say(f"  left over: {json.dumps(left) if left else 'nothing'}")
        return left

    def collect(self) -> None:
        """A host keeps what its children need until its next heartbeat says that they have left. Raises LabError."""
        for _ in attempts(TEARDOWN_TIMEOUT):
            for host in self.hosts:
                self.agents[host.name].gc()
            kept = [host.name for host in self.hosts if self.agents[host.name].status().images]
            if not kept:
                return
        raise LabError(f"these hosts keep the image after {TEARDOWN_TIMEOUT:.0f} s: {', '.join(kept)}")


def sha256(file: Path) -> str:
    """A file's sum."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def main() -> int:
    """Run the demo. Returns the exit code: 1 if anything failed or was left over."""
    parser = argparse.ArgumentParser(prog="python -m lab.kernel.demo", description=__doc__)
    parser.add_argument("--hosts", type=at_least_one, default=3, help="hosts besides the origin (default 3)")
    add_suite(parser)
    options = parser.parse_args()
    return present("demo-kernel", lambda folder: measure(folder, options.hosts, options.suite), trouble="left_over")


def measure(folder: Path, hosts: int, suite: str) -> dict[str, Any]:
    """Set up, run the demo, take down. Raises LabError."""
    tiny = tiny_vm(suite)
    with contextlib.ExitStack() as stack:
        view = stack.enter_context(View())
        view.phase(f"booting the origin and {hosts} hosts")
        cluster = stack.enter_context(KernelCluster(folder, hosts, suite=suite))
        view.phase("starting Volt and the agents")
        Services(cluster.machines).start()
        agents = {name: agent(machine) for name, machine in cluster.machines.items()}
        figures = {"hosts": hosts, **Demo(cluster, agents, tiny, view).run()}
        view.phase("stopping everything")
    return figures


if __name__ == "__main__":
    sys.exit(main())
