"""The demo: real VMs boot to their login prompt, at once, from one published image through a tree of hosts.

``python -m lab.demo [--hosts 4] [--vms 8]`` shows it and writes ``build/demo.json``. First one VM at a time on an
otherwise idle machine, for a fair comparison with a boot from a local file; then all VMs at once, cold and warm. Each
host has a network namespace and a link of 1 Gbit/s, if the machine allows that; else all are on its loopback.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from lab.blockerrors import BlockErrors
from lab.cluster import Cluster, destroy_all, network_names, proven_accel
from lab.errors import LabError, LoginFailed, NoNetwork
from lab.guest import guest
from lab.libvirt import PrivateLibvirt
from lab.localboot import LocalVm
from lab.login import io_errors, wait_login
from lab.network import Network
from lab.present import at_least_one, present
from lab.process import attempts, processes_of
from lab.tools import run
from lab.view import View, flatten
from volt.text import size_text

IMAGE = "guest"
HOW = {"memory": 512}
LOGIN_TIMEOUT = 300.0
GC_TIMEOUT = 60.0
ORIGIN = 0
LOOPBACK = "all hosts are on the loopback of this machine"
WIRE = "NBD over TCP and TLS 1.3 between hosts"


class Demo:
    """One run on a cluster whose first host is the origin. ``network``: that of the cluster, if it has one."""

    def __init__(self, cluster: Cluster, network: Network | None, uri: str, disk: Path, vms: int, view: View) -> None:
        self.cluster, self.network, self.uri, self.disk, self.view = cluster, network, uri, disk, view
        self.hosts = range(1, len(cluster.names))
        self.vms = vms
        self.console_errors = 0

    def run(self) -> dict[str, Any]:
        """All of it. Returns what was measured; raises LabError, VirtmanError."""
        self.view.phase("publishing the image on the origin")
        image = self.cluster.agents[ORIGIN].publish(IMAGE, self.disk)
        single = self.one_at_a_time()
        self.forget()
        waves = self.waves()
        return {"image_bytes": image.size, **single, **waves}

    def one_at_a_time(self) -> dict[str, Any]:
        """One VM from a local file, cold and warm on the deepest host, and again from the local file."""
        local = LocalVm(self.uri, "local", self.cluster.agents[ORIGIN], IMAGE, self.cluster.folder / "local", **HOW)
        self.view.phase("one VM from a local file")
        locals_s = [self.local_boot(local)]
        deepest = self.hosts[-1]
        for host in self.hosts[:-1]:
            self.cluster.agents[host].create(f"place-{host}", IMAGE)  # takes its place in the tree and reads nothing
        self.view.phase(f"one VM on {self.cluster.names[deepest]}, the last to join: cold, all caches above it too")
        cold_s = self.boot("cold", deepest, time.monotonic())
        fetched, depth = self.fetched(deepest), self.depth(deepest)
        self.cluster.agents[deepest].destroy("cold")
        self.view.phase("one VM on the same host, whose cache is warm now")
        warm_s = self.boot("warm", deepest, time.monotonic())
        self.cluster.agents[deepest].destroy("warm")
        self.view.phase("one VM from the local file again")
        locals_s.append(self.local_boot(local))
        local_s = statistics.mean(locals_s)
        return {
            "local_boot_s": local_s, "local_boots_s": locals_s, "cold_boot_s": cold_s, "cold_boot_depth": depth,
            "warm_boot_s": warm_s, "cold_to_local": cold_s / local_s, "warm_to_local": warm_s / local_s,
            "boot_set_bytes": fetched,
        }  # fmt: skip

    def local_boot(self, local: LocalVm) -> float:
        """Seconds to the login prompt from the local file."""
        seconds = local.boot(self.disk, LOGIN_TIMEOUT)
        self.console_errors += io_errors(local.console_log)
        self.view.say(f"  login after {seconds:.1f} s")
        return seconds

    def boot(self, vm: str, host: int, since: float) -> float:
        """Boot a VM and wait for its login prompt. Returns the seconds from ``since``, its disk and start included."""
        name = self.cluster.names[host]
        self.view.vm(vm, name, "starting")
        answer = self.cluster.agents[host].boot(vm, IMAGE, **HOW)
        self.view.vm(vm, name, "booting")
        try:
            seconds = wait_login(vm, Path(answer.machine.console_log), LOGIN_TIMEOUT) - since
        except LoginFailed:
            self.view.vm(vm, name, "NO LOGIN", final=True)
            raise
        self.console_errors += io_errors(Path(answer.machine.console_log))
        self.view.vm(vm, name, f"login after {seconds:.1f} s", final=True)
        return seconds

    def forget(self) -> None:
        """Make all hosts as if they had never seen the image. Raises LabError if one keeps it."""
        self.view.phase("all hosts forget the image")
        for host in self.hosts:
            destroy_all(self.cluster.agents[host])
        for _ in attempts(GC_TIMEOUT):
            # A host keeps what its children need until Volt has told it that they left: from the leaves, and again.
            for host in reversed(self.hosts):
                self.cluster.agents[host].gc()
            kept = [self.cluster.names[host] for host in self.hosts if self.cluster.agents[host].status().images]
            if not kept:
                return
        raise LabError(f"these hosts still have the image after {GC_TIMEOUT:.0f} s: {', '.join(kept)}")

    def waves(self) -> dict[str, Any]:
        """All VMs at once, cold, then destroyed and all at once again."""
        read_before, sent_before = self.origin_read(), self.origin_link()
        self.view.phase(f"{self.vms} VMs at once on {len(self.hosts)} hosts, cold")
        cold = self.wave()
        read, sent = self.origin_read() - read_before, self.origin_link() - sent_before
        fetched = [self.fetched(host) for host in self.hosts]
        tree = {node.host: (depth, node.parent) for depth, node in flatten(self.cluster.volt.tree(IMAGE).root)}
        names = [self.cluster.names[host] for host in self.hosts]
        for host in self.hosts:
            destroy_all(self.cluster.agents[host])
        self.view.phase(f"{self.vms} VMs at once again, warm")
        warm = self.wave()
        return {
            "wave_s": cold, "wave_median_s": statistics.median(cold), "wave_slowest_s": max(cold),
            "wave_warm_s": warm, "wave_warm_slowest_s": max(warm),
            "fetched_bytes_per_host": fetched, "origin_sent_bytes": read, "origin_link_bytes": sent,
            "depth_per_host": [tree[name][0] for name in names],
            "fetched_bytes_after_warm_wave": [self.fetched(host) for host in self.hosts],
        }  # fmt: skip

    def wave(self) -> list[float]:
        """Boot all VMs at once, evenly over the hosts. Returns each one's seconds from the common start."""
        since = time.monotonic()
        with self.showing_tree(), ThreadPoolExecutor(self.vms) as pool:
            placed = [(f"vm-{n + 1}", self.hosts[n % len(self.hosts)]) for n in range(self.vms)]
            return list(pool.map(lambda vm: self.boot(vm[0], vm[1], since), placed))

    @contextmanager
    def showing_tree(self) -> Iterator[None]:
        """Keep the view's tree up to date; Volt learns of bytes with every heartbeat."""
        done = threading.Event()

        def follow() -> None:
            while not done.wait(1.0):
                self.view.tree(self.cluster.volt.tree(IMAGE))

        follower = threading.Thread(target=follow, name="tree")
        follower.start()
        try:
            yield
        finally:
            done.set()
            follower.join()

    def fetched(self, host: int) -> int:
        """Bytes of the image that a host has fetched from its parents."""
        status = self.cluster.agents[host].status()
        return sum(image.fetched_bytes for image in status.images if image.name == IMAGE)

    def depth(self, host: int) -> int:
        """A host's depth in the tree; the origin has 0."""
        rows = flatten(self.cluster.volt.tree(IMAGE).root)
        return next(depth for depth, node in rows if node.host == self.cluster.names[host])

    def origin_read(self) -> int:
        """Bytes that the origin's chunk store has read from its file, by the kernel's count (proc(5), rchar).

        It keeps nothing, so it has sent each byte that it read. Bytes from sockets are not in this count.
        """
        processes = processes_of(self.cluster.run_folder(ORIGIN)).items()
        stores = [pid for pid, line in processes if Path(line.split()[0]).name == "virtman-chunkd"]
        counts = (Path(f"/proc/{pid}/io").read_text() for pid in stores)
        return sum(int(line.split()[1]) for count in counts for line in count.splitlines() if line.startswith("rchar:"))

    def origin_link(self) -> int:
        """Bytes that the origin has sent over its link, with all headers; 0 on the loopback."""
        return self.network.sent_bytes(self.cluster.names[ORIGIN]) if self.network else 0


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpus": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "kernel": platform.release(),
        "qemu": run(["qemu-system-x86_64", "--version"]).split("\n", 1)[0],
    }


def summary(view: View, figures: dict[str, Any]) -> None:
    """The figures for people."""
    table = Table(title="VirtMan demo", title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    sent = figures["origin_sent_bytes"]
    cold, warm = (
        f"{figures[f'{kind}_boot_s']:.1f} s, {figures[f'{kind}_to_local']:.3f} of local" for kind in ("cold", "warm")
    )
    link = f"; on its link {size_text(figures['origin_link_bytes'])}" if figures["origin_link_bytes"] else ""
    rows = [
        ("hosts, VMs, accelerator", f"{figures['hosts']}, {figures['vms']}, {figures['accel']}"),
        ("network", figures["network"]),
        ("all VMs at once, cold", f"slowest login after {figures['wave_slowest_s']:.1f} s"),
        ("all VMs at once, warm", f"slowest login after {figures['wave_warm_slowest_s']:.1f} s"),
        ("one VM, local file", f"{figures['local_boot_s']:.1f} s"),
        (f"one VM, cold, depth {figures['cold_boot_depth']}", cold),
        ("one VM, warm", warm),
        ("image", size_text(figures["image_bytes"])),
        ("one boot reads (boot set)", size_text(figures["boot_set_bytes"])),
        ("fetched by each host", ", ".join(size_text(count) for count in figures["fetched_bytes_per_host"])),
        ("sent by the origin", f"{size_text(sent)}, {sent / figures['boot_set_bytes']:.2f} boot sets{link}"),
        ("I/O errors in VMs", str(figures["io_errors"])),
    ]
    for row in rows:
        table.add_row(*row)
    view.console.print(table)


def main() -> int:
    """Run the demo. Returns the exit code: 1 if anything failed or a VM met an I/O error."""
    parser = argparse.ArgumentParser(prog="python -m lab.demo", description=__doc__)
    parser.add_argument("--hosts", type=at_least_one, default=4, help="hosts besides the origin (default 4)")
    parser.add_argument("--vms", type=at_least_one, default=8, help="VMs that boot at once (default 8)")
    options = parser.parse_args()
    return present("demo", lambda folder: measure(folder, options.hosts, options.vms), trouble="io_errors")


def measure(folder: Path, hosts: int, vms: int) -> dict[str, Any]:
    """Set up, run the demo, take down. Raises LabError, VirtmanError."""
    made = guest()
    with ExitStack() as stack:
        view = stack.enter_context(View())
        view.phase("choosing between KVM and TCG: booting a kernel with KVM, 10 s at most")
        accel = proven_accel(made.kernel)
        view.say(f"  VMs run with {accel}")
        view.phase(f"starting Volt, the origin and {hosts} hosts")
        libvirt = stack.enter_context(PrivateLibvirt(folder / "libvirt"))
        errors = stack.enter_context(BlockErrors(libvirt.uri))
        network = entered_network(stack, view, hosts + 1)
        cluster = stack.enter_context(Cluster(folder, hosts + 1, libvirt=libvirt.uri, accel=accel, network=network))
        demo = Demo(cluster, network, libvirt.uri, made.disk, vms, view)
        figures = {"hosts": hosts, "vms": vms, "accel": accel, "network": f"{network or LOOPBACK}; {WIRE}"}
        figures |= {"machine": machine(), **demo.run()}
        figures["io_errors"] = demo.console_errors + len(errors.seen)
        summary(view, figures)
        view.phase("stopping everything")
    return figures


def entered_network(stack: ExitStack, view: View, hosts: int) -> Network | None:
    """The hosts' own network, until ``stack`` ends; None, and a sentence for people, if the machine allows none."""
    try:
        network = stack.enter_context(Network(network_names(hosts)))
    except NoNetwork as error:
        view.say(f"  {error}; so {LOOPBACK}, as fast as it is")
        return None
    view.say(f"  {network}; {WIRE}")
    return network


if __name__ == "__main__":
    sys.exit(main())
