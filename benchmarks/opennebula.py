"""A wave of VMs by OpenNebula's drivers: with ours, and the ``ssh`` way of copying the same image, in one run.

All but OpenNebula's core is real with ONE_SOURCE (its driver processes, its ssh scripts); without, stand-ins of lab/
copy with tar over ssh as those do. Real are Volt, the agents, the hosts' stacks and our scripts; ssh is a program that
counts bytes and enters a host on this machine, so no network slows the copies down. VMs are not booted: a disk is ready
when its transfer has ended. Then every VM reads a boot set through its disk, which is checked.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from os import getloadavg
from pathlib import Path
from typing import Any

import click

from benchmarks.attach import timed
from benchmarks.clonecost import HOST, clone_cost
from benchmarks.command import SETTINGS, benchmark, finish
from benchmarks.errors import NoRoom
from benchmarks.figures import MIB, print_table, spread
from benchmarks.hosts import started_cluster
from benchmarks.processes import busy_seconds, say
from benchmarks.spreadimage import RUN_MIB, SpreadImage, check_disk
from lab.cluster import Cluster
from lab.opennebula import Frontend, Host, Image, Oned, Pace, Vm, carry_out, driver_of, one_source
from lab.process import kill_and_wait
from lab.tools import BUILD, CHECKOUT, run

SECONDS_BAR, BYTES_BAR = 10.0, 0.1
"""At least so many times sooner than by ssh, with at most so much of its bytes."""
BOOT_SET_MIB = 60
FANOUT = 2
ROUNDS = 15
"""Clones one after another, for where the time of one goes."""
SYSTEM = 0
PACES = {"tuned": Pace(20, 400, threads=60), "default": Pace()}
"""What ``install frontend --tuning`` advises (docs/opennebula.md), and what OpenNebula comes with. The first counts."""
ROOM_LEFT = 3 * 1024
"""MiB of disk that must stay free."""


@dataclass(frozen=True)
class Size:
    """How much is done; sizes in MiB."""

    vms: int
    hosts: int
    image: SpreadImage

    @property
    def room(self) -> int:
        """MiB of disk that are needed: a copy for each VM, the images, and what is staged while they are added."""
        return (self.vms + 6) * self.image.data + self.hosts * BOOT_SET_MIB

    def host(self, number: int) -> str:
        """Where a VM goes."""
        return f"host-{1 + number % self.hosts}"


@dataclass(frozen=True)
class Way:
    """A way to get VMs' disks: the driver's name, the number of its datastore and image, and that of its first VM."""

    name: str
    store: int
    first: int


VIRTMAN, SSH = Way("virtman", 100, 1000), Way("ssh", 101, 2000)


@dataclass
class Stand:
    """What a pair of waves runs on."""

    folder: Path
    cluster: Cluster
    frontend: Frontend
    one: Oned
    size: Size

    def over_ssh(self) -> int:
        """Bytes to and from hosts by ssh so far, with the commands."""
        calls = self.frontend.exchange.calls
        to_hosts = [call for call in calls if call.program == "ssh" and call.host != self.frontend.name]
        return sum(call.bytes_in + call.bytes_out + len(call.line.encode()) for call in to_hosts)

    def fetched(self) -> dict[str, int]:
        """Bytes that each host has fetched from its parents so far."""
        with ThreadPoolExecutor(16) as pool:
            answers = pool.map(lambda agent: agent.status(), self.cluster.agents[1:])
            each = [sum(image.fetched_bytes for image in answer.images) for answer in answers]
        return dict(zip(self.cluster.names[1:], each, strict=True))

    def disk(self, vm: Vm) -> Path:
        """A VM's disk as its hypervisor finds it."""
        link = self.frontend.seen(vm.here.host, self.frontend.datastores() / str(SYSTEM) / str(vm.number) / "disk.0")
        return link.readlink() if link.is_symlink() else link


@contextmanager
def stand(name: str, size: Size, pace: Pace, leftovers: list[str]) -> Iterator[Stand]:
    """Agents, front end and drivers, of which nothing stays."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=BUILD, prefix="opennebula-")))
        cluster = stack.enter_context(started_cluster(f"opennebula-{name}", size.hosts, FANOUT, leftovers))
        hosts = {
            host: Host(cluster.socket(number), (cluster.state_folder(number),))
            for number, host in enumerate(cluster.names)
        }
        frontend = stack.enter_context(Frontend(folder / "stand", hosts, source=one_source()))
        install(frontend)
        driver = stack.enter_context(driver_of(frontend, at_once=pace.threads))
        one = Oned(frontend, driver)
        one.system_datastore(SYSTEM, "ssh")
        safe = {"SAFE_DIRS": str(folder)}
        ours = {"BRIDGE_LIST": "origin", "DRIVER": "qcow2", "DISK_TYPE": "FILE", "TM_MAD_SYSTEM": "ssh,local"}
        one.image_datastore(VIRTMAN.store, "virtman", "virtman", **ours, **safe)
        one.image_datastore(SSH.store, "ssh", "fs", **safe)
        try:
            yield Stand(folder, cluster, frontend, one, size)
        except BaseException:
            # What still copies would fill the disk, and keep its driver from ending. A script whose copy was killed
            # may have begun the next thing meanwhile.
            while found := frontend.processes():
                for pid in found:
                    kill_and_wait(pid)
            raise


def install(frontend: Frontend) -> None:
    """Install our drivers as an operator does."""
    program, location = CHECKOUT / "opennebula_tm" / "install", frontend.location
    run([program, "frontend", "--stack", "chunkstore", "--yes", "--one-location", location])


def add_image(stand: Stand, way: Way) -> tuple[Image, float]:
    """Add the image, which is made for that. Returns it, and the seconds that adding it took."""
    file = stand.folder / "image.qcow2"
    stand.size.image.write(file)
    image = Image(way.store, way.store, str(file))
    try:
        return image, timed(lambda: stand.one.add_image(image).check())
    finally:
        file.unlink()


def waiting_vms(stand: Stand, way: Way, image: Image, count: int, first: int) -> list[Vm]:
    """VMs with a disk of the image each, which wait for a host."""
    return [
        stand.one.vm([stand.one.disk_of(image, 0, "ssh", DRIVER="qcow2")], way.first + first + number)
        for number in range(count)
    ]


def wave(stand: Stand, way: Way, pace: Pace, *, alone: bool) -> dict[str, Any]:
    """Add the image, make all disks, read a boot set through each of them, and remove the disks.

    ``alone``: look at clones of ours one by one, too.
    """
    size = stand.size
    say(f"{way.name}: adding the image")
    before = stand.over_ssh()
    image, add_s = add_image(stand, way)
    added_bytes = stand.over_ssh() - before
    vms = waiting_vms(stand, way, image, size.vms, 0)
    before, calls, load = stand.over_ssh(), len(stand.frontend.exchange.calls), getloadavg()
    fetched_before = sum(stand.fetched().values())
    say(f"{way.name}: {size.vms} VMs on {size.hosts} hosts (load {load[0]:.1f})")
    busy = busy_seconds()
    carried = carry_out(
        [size.host(number) for number in range(size.vms)],
        pace,
        lambda number: stand.one.deploy(vms[number], size.host(number), SYSTEM).check(),
    )
    busy = busy_seconds() - busy
    made = stand.frontend.exchange.calls[calls:]
    ssh_bytes, fetched = stand.over_ssh() - before, sum(stand.fetched().values()) - fetched_before
    say(f"{way.name}: all disks ready after {carried.all_s:.1f} s; every VM reads {BOOT_SET_MIB} MiB")
    read_s = read_all([stand.disk(vm) for vm in vms], size.image)
    by_host = stand.fetched()
    figures = {
        "add_image_s": add_s, "add_image_bytes": added_bytes,
        "s": carried.all_s, "bytes": ssh_bytes + fetched, "over_ssh_bytes": ssh_bytes, "fetched_bytes": fetched,
        "boot_set_s": carried.all_s + read_s,
        "boot_set_bytes": ssh_bytes + sum(by_host.values()) - fetched_before,
        "fetched_bytes_by_host": by_host,
        "transfer_s": spread(carried.each_s), "passes": carried.passes,
        "call_s": {name: spread([call.seconds for call in made if call.program == name])
                   for name in sorted({call.program for call in made})},
        "cpu_busy_s": busy, "load_before": load,
    }  # fmt: skip
    if alone and way is VIRTMAN:
        figures["cost"] = cost_of_clones(stand, image)
    say(f"{way.name}: removing the disks")
    with ThreadPoolExecutor(size.vms) as pool:
        for ended in pool.map(stand.one.terminate, vms):
            ended.check()
    stand.one.remove_image(image).check()
    return figures


def cost_of_clones(stand: Stand, image: Image) -> dict[str, Any]:
    """Where the time of a clone goes."""
    say(f"cloning {ROUNDS} times, one after another")
    more = waiting_vms(stand, VIRTMAN, image, ROUNDS, stand.size.vms)
    name = Path(image.source).name
    cost = clone_cost(stand.cluster, stand.frontend, name, more, lambda vm: stand.one.deploy(vm, HOST, SYSTEM))
    for vm in more:
        stand.one.terminate(vm).check()
    return cost


def read_all(disks: Sequence[Path], image: SpreadImage) -> float:
    """Every VM reads its boot set, all at once. Returns the seconds of all. Raises WrongBytes."""
    reads = image.reads(BOOT_SET_MIB)
    with ThreadPoolExecutor(len(disks)) as pool:
        return timed(lambda: list(pool.map(lambda disk: check_disk(disk, reads), disks)))


def ratios(virtman: dict[str, Any], ssh: dict[str, Any]) -> dict[str, float]:
    """How many times sooner ours is, and the share of the bytes."""
    return {
        "times_sooner": ssh["s"] / virtman["s"],
        "share_of_bytes": virtman["bytes"] / ssh["bytes"],
        "times_sooner_with_boot_set": ssh["boot_set_s"] / virtman["boot_set_s"],
        "share_of_bytes_with_boot_set": virtman["boot_set_bytes"] / ssh["boot_set_bytes"],
    }


def within(found: dict[str, float]) -> dict[str, bool]:
    """Whether the bars are met."""
    return {
        "seconds": found["times_sooner"] >= SECONDS_BAR,
        "bytes": found["share_of_bytes"] <= BYTES_BAR,
    }


def check_room(size: Size, folder: Path) -> None:
    """Raises NoRoom, before anything is written."""
    free = shutil.disk_usage(folder).free // MIB
    if free < size.room + ROOM_LEFT:
        raise NoRoom(
            f"{folder} has {free} MiB free, and {size.vms} copies of {size.image.data} MiB need"
            f" {size.room + ROOM_LEFT}: give fewer --vms or less --data"
        )


def measure(size: Size, names: Sequence[str], leftovers: list[str]) -> dict[str, Any]:
    """Both ways, for each pace."""
    cases = {}
    for name in names:
        pace = PACES[name]
        say(f"{name}: {pace}")
        with stand(name, size, pace, leftovers) as here:
            both = {way.name: wave(here, way, pace, alone=name == names[0]) for way in (VIRTMAN, SSH)}
        found = ratios(both["virtman"], both["ssh"])
        cases[name] = {"settings": asdict(pace), **both, "ratios": found, "within_bar": within(found)}
    return cases


def print_cases(size: Size, cases: dict[str, Any], scripts: str) -> None:
    """Tables for people."""
    for name, case in cases.items():
        pace = PACES[name]
        rows = [
            [way, f"{case[way]['add_image_s']:.1f}", f"{case[way]['s']:.2f}", f"{case[way]['bytes'] / MIB:.1f}",
             f"{case[way]['boot_set_s']:.2f}", f"{case[way]['boot_set_bytes'] / MIB:.1f}",
             f"{case[way]['transfer_s']['median']:.2f}"]
            for way in ("virtman", "ssh")
        ]  # fmt: skip
        found = case["ratios"]
        rows.append(
            ["ratio", "", f"{found['times_sooner']:.1f} times", f"{found['share_of_bytes']:.5f}",
             f"{found['times_sooner_with_boot_set']:.1f} times", f"{found['share_of_bytes_with_boot_set']:.5f}", ""]
        )  # fmt: skip
        print_table(
            f"{size.vms} VMs on {size.hosts} hosts, {size.image.data} MiB of data in an image of {size.image.size} MiB;"
            f" ssh by {scripts}; bars: {SECONDS_BAR:g} times sooner, {BYTES_BAR:g} of the bytes\n"
            f"{name}: MAX_ACTIONS_PER_HOST {pace.actions_per_host}, MAX_ACTIONS_PER_CLUSTER"
            f" {pace.actions_per_cluster}, MANAGER_TIMER {pace.manager_timer:g} s, TM_MAD -t {pace.threads}",
            ["way", "add image, s", "all disks, s", "MiB", f"+ {BOOT_SET_MIB} MiB read, s", "MiB", "a transfer, s"],
            rows,
        )
    cost = next(iter(cases.values()))["virtman"]["cost"]
    print_table(
        f"A clone alone, median of {cost['rounds']}; the agent's own CPU time is {cost['agents_cpu_s'] * 1000:.0f} ms",
        ["ms", "time", "CPU time"],
        [[part, f"{took['s'] * 1000:.0f}", f"{took['cpu_s'] * 1000:.0f}"] for part, took in cost["parts"].items()]
        + [[part, f"{seconds * 1000:.0f}", ""] for part, seconds in cost["called_s"].items()],
    )


@click.command(context_settings=SETTINGS)
@click.option("--vms", type=click.IntRange(min=1), default=60, show_default=True)
@click.option("--hosts", type=click.IntRange(min=1), default=4, show_default=True, help="Besides the image's origin.")
@click.option("--size", "size_mib", type=click.IntRange(min=RUN_MIB), default=2048, show_default=True, help="In MiB.")
@click.option(
    "--data", "data_mib", type=click.IntRange(min=RUN_MIB), default=1024, show_default=True,
    help=f"MiB of the image that are data, a multiple of {RUN_MIB}; the others are holes.",
)  # fmt: skip
@click.option(
    "--settings", "names", type=click.Choice(list(PACES)), multiple=True, default=list(PACES), show_default=True,
    help="Of OpenNebula; the first case counts.",
)  # fmt: skip
def main(vms: int, hosts: int, size_mib: int, data_mib: int, names: Sequence[str]) -> None:
    """Start a wave of VMs by OpenNebula's drivers, with ours and by copies over ssh.

    Needs root. Writes build/opennebula.json and prints a table. With ONE_SOURCE, OpenNebula's own driver processes and
    ssh scripts are used.

    \b
    Examples:
      python -m benchmarks.opennebula
      python -m benchmarks.opennebula --vms 8 --hosts 2 --data 64 --settings tuned
    """
    if data_mib % RUN_MIB or data_mib > size_mib:
        raise click.UsageError(f"--data must be a multiple of {RUN_MIB} and at most --size")
    with benchmark():
        size = Size(vms, hosts, SpreadImage(size_mib, data_mib))
        BUILD.mkdir(exist_ok=True)
        check_room(size, BUILD)
        leftovers: list[str] = []
        cases = measure(size, names, leftovers)
        scripts = "OpenNebula's own scripts" if one_source() else "the stand-in's scripts"
        print_cases(size, cases, scripts)
        first = cases[names[0]]
        figures = {
            "vms": vms, "hosts": hosts, "image_bytes": size_mib * MIB, "data_bytes": data_mib * MIB,
            "virtman_s": first["virtman"]["s"], "ssh_s": first["ssh"]["s"],
            "virtman_bytes": first["virtman"]["bytes"], "ssh_bytes": first["ssh"]["bytes"],
            "ratios": first["ratios"], "bars": {"times_sooner": SECONDS_BAR, "share_of_bytes": BYTES_BAR},
            "within_bar": first["within_bar"], "main_case": names[0], "boot_set_mib": BOOT_SET_MIB,
            "ssh_scripts": scripts, "cases": cases,
        }  # fmt: skip
        finish("opennebula", figures, leftovers)


if __name__ == "__main__":
    main()
