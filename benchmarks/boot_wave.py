"""Boot many VMs at once, as far as their disks are concerned: the reads of a real boot, replayed through real hosts.

One boot of the image is recorded (and kept). Its reads are then played by V VMs on each of H hosts, all at once, each
VM one read after another: through a tree of hosts, through the same hosts all attached to the origin (a star), and on
private disks directly over a local raw file. All but the VMs is real: Volt, agents, chunk stores, disks.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import attach, usage
from benchmarks.command import SETTINGS, benchmark, finish
from benchmarks.disks import exported, local_disks
from benchmarks.errors import WrongBytes
from benchmarks.figures import MIB, percentile, print_table, write_json
from benchmarks.hosts import (
    STATUS_AGE,
    chunk_store,
    host_status,
    image_status,
    parents_in_use,
    settled_places,
    started_cluster,
)
from benchmarks.misses import Place, by_depth, misses
from benchmarks.nbdreplay import Disk, NbdDisk, Replay, replay
from benchmarks.processes import file_bytes_read, say
from benchmarks.recorder import boot_trace
from benchmarks.trace import Trace, boot_set_bytes, first_touches, untouched_offset
from lab.cluster import Cluster
from lab.guest import guest
from virtman.client import AgentClient

LIMIT = 600.0
"""Seconds that one wave may take."""

ALONE = 5
"""Hosts that are attached one by one, for the time of one host alone."""

IMAGE, IMAGE_ALONE = "wave", "wave-alone"
RATIOS = ("tree_to_local", "tree_to_star", "star_to_local")
_PROBE_ROOM = MIB


@dataclass(frozen=True)
class Size:
    """How many hosts, and VMs on each of them."""

    hosts: int
    vms_per_host: int

    def vms(self, hosts: Sequence[str]) -> dict[str, list[str]]:
        """Names of VMs by host."""
        return {host: [f"{host}-vm{number}" for number in range(self.vms_per_host)] for host in hosts}


@dataclass(frozen=True)
class Boot:
    """What every VM reads: the image, the trace, the share of the recorded gaps to keep, and the reads' checksum."""

    image: Path
    trace: Trace
    think: float
    checksum: int


def checksum(image: Path, trace: Trace) -> int:
    """CRC-32 of what a VM gets that plays the trace on the image."""
    value = 0
    with image.open("rb") as file:
        for read in trace.reads:
            file.seek(read.offset)
            value = zlib.crc32(file.read(read.length), value)
    return value


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder for sockets, whose paths are limited to 107 bytes (unix(7))."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="wave-") as name:
        yield Path(name)


def play(sockets: Mapping[str, Path], vms: Mapping[str, Sequence[str]], boot: Boot) -> Replay:
    """Play the boot on all VMs' disks. Raises WrongBytes.

    The bytes of one VM per host are checked: checking all would take more CPU time than the storage does.
    """
    disks = [Disk(vm, host, sockets[host], verify=vm == of_host[0]) for host, of_host in vms.items() for vm in of_host]
    done = replay(disks, boot.trace.reads, think=boot.think, limit=LIMIT)
    for vm in done.vms:
        if vm.checksum not in (None, boot.checksum):
            raise WrongBytes(f"{vm.vm} read other bytes than the image has")
    return done


def wait_for_disks(sockets: Mapping[str, Path], vms: Mapping[str, Sequence[str]]) -> None:
    """Return when the disks of all hosts are open."""
    for host, server in sockets.items():
        NbdDisk(server, vms[host][-1]).close()


def vm_figures(done: Replay) -> dict[str, Any]:
    """Times of the VMs and of their reads, and what playing them took."""
    seconds = [vm.ended - vm.began for vm in done.vms]
    waits = [wait for of_host in done.waits.values() for wait in of_host]
    return {
        "vm_s": {"first": min(seconds), "median": percentile(seconds, 50), "slowest": max(seconds)},
        "read_s": {"p50": percentile(waits, 50), "p99": percentile(waits, 99)},
        "verified_vms": sum(vm.checksum is not None for vm in done.vms),
        "replay_cpu_s": round(done.cpu_s, 2),
    }


def local_wave(size: Size, boot: Boot) -> dict[str, Any]:
    """The same VMs on private disks directly over the raw file."""
    vms = size.vms([f"host-{number}" for number in range(1, size.hosts + 1)])
    with short_folder() as folder, exported(folder, local_disks(folder, boot.image, vms)) as sockets:
        wait_for_disks(sockets, vms)
        pids = usage.processes([], folder)
        before = usage.cpu(pids)
        say(f"local file: playing {size.hosts * size.vms_per_host} boots at once")
        done = play(sockets, vms, boot)
        return vm_figures(done) | {
            "cpu_s": usage.cpu_between(before, usage.cpu(pids)),
            "memory_bytes_per_process": usage.memory_per_process(pids),
        }


def cluster_wave(name: str, size: Size, boot: Boot, fanout: int, leftovers: list[str]) -> dict[str, Any]:
    """The VMs on real hosts in a tree of this fanout: attach, then the wave."""
    with (
        short_folder() as folder,
        started_cluster(f"boot_wave-{name}", size.hosts, fanout, leftovers) as cluster,
    ):
        hosts = dict(zip(cluster.names[1:], cluster.agents[1:], strict=True))
        vms = size.vms(list(hosts))
        publish(cluster.agents[0], boot.image, folder)
        alone_s = attach.alone(list(hosts.values())[:ALONE], IMAGE_ALONE)
        bare_s = attach.bare_processes(folder, list(hosts))
        say(f"{name}: attaching {size.hosts} hosts at once")
        each_s, all_s = attach.together(list(hosts), lambda host: hosts[host].create(vms[host][0], IMAGE))
        say(f"{name}: creating the other VMs' disks")
        attach.together(list(hosts), lambda host: create_rest(hosts[host], vms[host]))
        where = settled_places(cluster, IMAGE)
        disks = {host: {vm: hosts[host].vm(vm).disk.blockdev or {} for vm in of_host} for host, of_host in vms.items()}
        with exported(folder, disks) as sockets:
            wait_for_disks(sockets, vms)
            say(f"{name}: playing {size.hosts * size.vms_per_host} boots at once")
            return {
                "fanout": fanout,
                "depth": max(place.depth for place in where.values()),
                "attach": attach.figures(alone_s, each_s, all_s, bare_s, where),
                **measured_wave(cluster, folder, boot, sockets, vms, where),
            }


def publish(origin: AgentClient, image: Path, folder: Path) -> None:
    """Publish the image for the wave, and a small one for the attach of single hosts: an attach reads no content."""
    say(f"publishing {image}")
    origin.publish(IMAGE, image)
    small = folder / "small.raw"
    small.write_bytes(bytes(MIB))
    origin.publish(IMAGE_ALONE, small)


def create_rest(agent: AgentClient, vms: Sequence[str]) -> None:
    """The disks of all VMs but the first."""
    for vm in vms[1:]:
        agent.create(vm, IMAGE)


def measured_wave(
    cluster: Cluster,
    folder: Path,
    boot: Boot,
    sockets: Mapping[str, Path],
    vms: Mapping[str, Sequence[str]],
    where: Mapping[str, Place],
) -> dict[str, Any]:
    """Play the wave and tell what it took."""
    pids = usage.processes([cluster.folder, cluster.run_folder(0).parent], folder)
    origin_store = chunk_store(cluster, cluster.names[0])
    cpu_before, read_before = usage.cpu(pids), file_bytes_read(origin_store)
    done = play(sockets, vms, boot)
    cpu_s = usage.cpu_between(cpu_before, usage.cpu(pids))
    read = file_bytes_read(origin_store) - read_before
    time.sleep(STATUS_AGE)
    statuses = image_status(cluster, IMAGE)
    fetched = {host: status.fetched_bytes for host, status in statuses.items()}
    from_origin = sum(fetched[host] for host, place in where.items() if place.parent == cluster.names[0])
    cluster_size = fetch_unit(cluster, sockets, vms, boot, where)
    touches = first_touches(boot.trace.reads, cluster_size)
    return {
        **vm_figures(done),
        "miss_s_by_depth": by_depth(misses(done.hosts, where, touches), where),
        "read_s_by_depth": by_depth(done.waits, where),
        "fetch_unit_bytes": cluster_size,
        "fetched_bytes_per_host": list(fetched.values()),
        "origin_sent_bytes": from_origin,
        "origin_file_bytes_read": read,
        "hosts_that_changed_parents": sum(
            where[host].parent != parent for host, parent in parents_in_use(statuses).items()
        ),
        "cpu_s": cpu_s,
        "memory_bytes_per_process": usage.memory_per_process(pids),
    }


def fetch_unit(
    cluster: Cluster,
    sockets: Mapping[str, Path],
    vms: Mapping[str, Sequence[str]],
    boot: Boot,
    where: Mapping[str, Place],
) -> int:
    """The bytes in which a host fetches, found by reading one sector, where no boot reads, on the deepest host.

    The sector holds data: nobody fetches zeros.
    """
    with boot.image.open("rb") as image:
        offset = untouched_offset(
            boot.trace.reads, boot.trace.image_bytes, _PROBE_ROOM, lambda at: any(os.pread(image.fileno(), 512, at))
        )
    host = max(where, key=lambda name: where[name].depth)
    before = host_status(cluster, host, IMAGE).fetched_bytes
    with NbdDisk(sockets[host], vms[host][0]) as disk:
        disk.read(offset, 512)
    time.sleep(STATUS_AGE)
    return int(host_status(cluster, host, IMAGE).fetched_bytes - before)


def boot_set(trace: Trace, unit: int) -> dict[str, int]:
    """The union of the trace's reads: exact, and rounded to the unit in which hosts fetch."""
    return {
        "reads": len(trace.reads),
        "bytes": boot_set_bytes(trace.reads),
        "rounded_bytes": boot_set_bytes(trace.reads, unit, trace.image_bytes),
    }


def bars(wave: Mapping[str, Any], star: Mapping[str, Any], wanted: Mapping[str, int]) -> dict[str, float]:
    """The figures that the project has set itself bars for."""
    fetched, exact, rounded = max(wave["fetched_bytes_per_host"]), wanted["bytes"], wanted["rounded_bytes"]
    attached = wave["attach"]
    return {
        "fetched_to_boot_set": fetched / rounded,
        "fetched_to_exact_boot_set": fetched / exact,
        "origin_sent_to_fanout_boot_sets": wave["origin_sent_bytes"] / (wave["fanout"] * rounded),
        "origin_sent_to_exact_fanout_boot_sets": wave["origin_sent_bytes"] / (wave["fanout"] * exact),
        "attach_all_to_one_alone": attached["all_s"] / attached["alone_s"]["median"],
        "attach_all_to_bare_processes": attached["all_s"] / attached["bare_processes_s"],
        "attach_all_to_star": attached["all_s"] / star["attach"]["all_s"],
    }


def ratios(wave: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """How many times as long as in another wave the VMs took."""
    return {name: wave["vm_s"][name] / other["vm_s"][name] for name in ("first", "median", "slowest")}


def run(size: Size, boot: Boot, fanout: int, leftovers: list[str]) -> dict[str, Any]:
    """All waves, one after another, and what they show."""
    trace = boot.trace
    waves: dict[str, Callable[[], dict[str, Any]]] = {
        "local": lambda: local_wave(size, boot),
        "tree": lambda: cluster_wave("tree", size, boot, fanout, leftovers),
        "star": lambda: cluster_wave("star", size, boot, size.hosts, leftovers),
    }
    done = {}
    for name, wave in waves.items():
        done[name] = wave()
        write_json("boot_wave", {"unfinished": True, **done})  # a later wave that fails loses none before it
    local, tree, star = done.values()
    wanted = boot_set(trace, tree["fetch_unit_bytes"])
    return {
        "hosts": size.hosts,
        "vms_per_host": size.vms_per_host,
        "think": boot.think,
        "image_bytes": trace.image_bytes,
        "recorded_boot_s": trace.boot_s,
        "boot_set": wanted,
        "bars": bars(tree, star, wanted),
        "tree_to_local": ratios(tree, local),
        "tree_to_star": ratios(tree, star),
        "star_to_local": ratios(star, local),
        **done,
    }


def print_report(figures: Mapping[str, Any]) -> None:
    """The figures for people."""
    waves = {name: figures[name] for name in ("local", "tree", "star")}
    wanted = figures["boot_set"]
    print_table(
        f"{figures['hosts']} hosts x {figures['vms_per_host']} VMs; a boot is {wanted['reads']} reads of"
        f" {mib(wanted['bytes'])}, {mib(wanted['rounded_bytes'])} in the unit of the caches",
        ["", "first VM", "median", "slowest", "read p50", "p99", "fetched/host", "origin sent", "CPU"],
        [
            [
                name,
                *(f"{wave['vm_s'][which]:.2f} s" for which in ("first", "median", "slowest")),
                *(milliseconds(wave["read_s"][which]) for which in ("p50", "p99")),
                mib(max(wave.get("fetched_bytes_per_host", [0]))),
                mib(wave.get("origin_sent_bytes", 0)),
                f"{wave['cpu_s']['all']:.1f} s",
            ]
            for name, wave in waves.items()
        ],
    )
    for name in ("tree", "star"):
        print_depths(name, waves[name])
    print_processes(waves)
    rows = [[name.replace("_", " "), f"{value:.3f}"] for name, value in figures["bars"].items()]
    rows += [[f"{name.replace('_', ' ')}, slowest VM", f"{figures[name]['slowest']:.3f}"] for name in RATIOS]
    print_table("Ratios of the tree", ["", ""], rows)


def print_depths(name: str, wave: Mapping[str, Any]) -> None:
    """What a miss and an attach took, by depth."""
    attached = wave["attach"]
    print_table(
        f"{name} of fanout {wave['fanout']}: attach of all {attached['all_s']:.2f} s, of one alone"
        f" {attached['alone_s']['median']:.3f} s, bare processes for all {attached['bare_processes_s']:.2f} s",
        ["depth", "misses", "miss p50", "p99", "any read p50", "p99", "attach median"],
        [
            [str(depth), str(miss["n"]), milliseconds(miss["p50"]), milliseconds(miss["p99"])]
            + [milliseconds(wave["read_s_by_depth"][depth][which]) for which in ("p50", "p99")]
            + [f"{attached['by_depth_s'][depth]:.3f} s"]
            for depth, miss in wave["miss_s_by_depth"].items()
        ],
    )


def print_processes(waves: Mapping[str, Any]) -> None:
    """CPU time of all processes of a kind, and the memory of one."""
    print_table(
        "Processes",
        ["wave", "kind", "CPU of all", "RSS of one", "PSS of one"],
        [
            [name, kind, f"{wave['cpu_s'][kind]:.2f} s", mib(one["rss"]), mib(one["pss"])]
            for name, wave in waves.items()
            for kind, one in wave["memory_bytes_per_process"].items()
        ],
    )


def mib(size: float) -> str:
    """Bytes for people."""
    return f"{size / MIB:.1f} MiB"


def milliseconds(seconds: float) -> str:
    """Seconds for people."""
    return f"{seconds * 1000:.2f} ms"


@click.command(context_settings=SETTINGS)
@click.option("--hosts", type=click.IntRange(min=1), default=8, show_default=True, help="Hosts besides the origin.")
@click.option("--vms-per-host", type=click.IntRange(min=1), default=2, show_default=True, help="VMs on each host.")
@click.option(
    "--image", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Raw disk. Default: the lab's guest."
)
@click.option("--fanout", type=click.IntRange(min=1), default=2, show_default=True, help="Children of a host.")
@click.option(
    "--trace", "trace_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A recorded boot of this image. Default: the one in build/traces, recorded if it is not there.",
)  # fmt: skip
@click.option(
    "--think", type=click.FloatRange(min=0), default=0.0, show_default=True,
    help="Share of the recorded time between two reads to wait before each read; 0 reads as fast as can be.",
)  # fmt: skip
def main(hosts: int, vms_per_host: int, image: Path | None, fanout: int, trace_file: Path | None, think: float) -> None:
    """Replay one boot's reads as many VMs on many hosts, through a tree, a star and from a local file.

    Writes build/boot_wave.json and prints tables. Needs nbdkit the first time.

    \b
    Examples:
      python -m benchmarks.boot_wave --hosts 4 --vms-per-host 2
      python -m benchmarks.boot_wave --hosts 100 --vms-per-host 10          # 10 to 13 minutes on 2 cores
      python -m benchmarks.boot_wave --hosts 8 --vms-per-host 4 --think 1   # at the pace of the recorded boot
      python -m benchmarks.boot_wave --image debian-12.raw --fanout 3
    """
    with benchmark():
        leftovers: list[str] = []
        disk = (image or guest().disk).absolute()
        trace = boot_trace(disk, trace_file)
        figures = run(Size(hosts, vms_per_host), Boot(disk, trace, think, checksum(disk, trace)), fanout, leftovers)
        print_report(figures)
        finish("boot_wave", figures, leftovers)


if __name__ == "__main__":
    main()
