"""A wave of servers by Nova, from one image, in three ways in one run: private disks of a base volume by our patch and
the agents, Nova's own qcow2 backend, which has each host download the image, and a volume for each server that Cinder's
NFS driver copies from the image.

The time is that from the one call of Nova's API until the last disk is ready. Nova's API, conductor, scheduler and
computes are real, and so are Cinder's driver, agents, Volt and chunk stores. libvirt is Nova's fake one: no server
boots. Glance is a file of this machine and the NFS share a folder, so no network slows the copies down. Then every
server reads a boot set through its disk, which is checked. A wave without disks shows what Nova itself takes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from benchmarks.attach import timed
from benchmarks.command import SETTINGS, benchmark, finish
from benchmarks.errors import Failed, NoRoom
from benchmarks.figures import MIB, print_table
from benchmarks.openstack.plan import BOOT_SET_MIB, GIB_MIB, IMAGE, NOTHING, VIRTMAN, VOLUME, WAYS, Plan, base_figures
from benchmarks.processes import say
from benchmarks.spreadimage import RUN_MIB
from lab.tools import BUILD, CHECKOUT, run
from tests.openstack.__main__ import alone

SECONDS_BAR, BYTES_BAR = 10.0, 0.1
"""At least so many times sooner than each other way, with at most so much of its bytes."""
OTHERS = (IMAGE, VOLUME)
ROOM_LEFT = 3 * 1024
"""MiB of disk that must stay free."""
PYTHON = BUILD / "openstack/venv/bin/python"
PATCHED_NOVA = "from tests.openstack.__main__ import copy_nova; print(copy_nova(patched=True))"
NAMES = {
    NOTHING: "Nova alone, without disks",
    VIRTMAN: "ours: base volume",
    IMAGE: "image: qcow2 backend",
    VOLUME: "volume: copy for each server",
}


def check_room(plan: Plan, folder: Path) -> None:
    """Raises NoRoom, before anything is written."""
    free = shutil.disk_usage(folder).free // MIB
    needed = plan.data + max(plan.room(way) for way in WAYS) + ROOM_LEFT
    if free < needed:
        raise NoRoom(
            f"{folder} has {free} MiB free, and {plan.servers} servers of {plan.data} MiB need {needed}: give fewer"
            f" --servers or less --data"
        )


@contextmanager
def patched_nova() -> Iterator[Path]:
    """The folder of a patched Nova, which is ours meanwhile."""
    say("making the environment with Nova and Cinder, if it is not there")
    run([CHECKOUT / "lab/openstack-venv"])
    with alone():
        yield Path(run_python(["-c", PATCHED_NOVA], {}).splitlines()[-1])


def run_python(argv: list[str | Path], environment: dict[str, str]) -> str:
    """Run the environment's Python in the checkout; what goes wrong is on standard error. Raises Failed."""
    done = subprocess.run(
        [str(word) for word in [PYTHON, "-W", "ignore", *argv]], cwd=CHECKOUT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(CHECKOUT)} | environment, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise Failed(f"{argv[1]} ended with {done.returncode}: see above")
    return done.stdout


def settle(source: Path) -> None:
    """Before each wave: nothing is left to be written, and the source is in the page cache."""
    os.sync()
    with source.open("rb") as content:
        while content.read(MIB):
            pass


def wave(way: str, plan: Plan, source: Path, folder: Path, nova: Path) -> dict[str, Any]:
    """One way, of whose disks nothing stays."""
    work = folder / "work"
    work.mkdir()
    result, written = folder / "result.json", folder / "plan.json"
    plan.write(written)
    settle(source)
    say(f"{NAMES[way]}: {plan.servers} servers on {plan.computes} computes (load {os.getloadavg()[0]:.1f})")
    environment = {
        "PYTHONPATH": f"{nova}:{CHECKOUT}", "TMPDIR": str(work),
        # Threads, as Nova's services have them from now on; what tests log goes nowhere.
        "OS_NOVA_DISABLE_EVENTLET_PATCHING": "true", "OS_STDOUT_CAPTURE": "0", "OS_STDERR_CAPTURE": "0",
    }  # fmt: skip
    try:
        run_python(["-m", "benchmarks.openstack.wave", way, written, source, work, result], environment)
        figures: dict[str, Any] = json.loads(result.read_text())
        return figures
    finally:
        shutil.rmtree(work, ignore_errors=True)


BASE = """
import sys
from pathlib import Path
from benchmarks.openstack.copyingcinder import base_volume
from benchmarks.openstack.plan import Plan
print(base_volume(Path(sys.argv[1]), Path(sys.argv[2]), Plan.read(Path(sys.argv[3]))))
"""


def make_base(folder: Path, image: Path, plan: Plan) -> tuple[Path, float]:
    """The base volume, and the seconds that Cinder took for it: an operator has it made once."""
    written = folder / "plan.json"
    plan.write(written)
    said: list[str] = []
    argv: list[str | Path] = ["-c", BASE, folder / "base", image, written]
    seconds = timed(lambda: said.append(run_python(argv, {})))
    return Path(said[0].splitlines()[-1]), seconds


def measure(plan: Plan) -> dict[str, Any]:
    """All ways, one after another."""
    with patched_nova() as nova, tempfile.TemporaryDirectory(dir=BUILD, prefix="nova-") as name:
        folder, image = Path(name), Path(name) / "image.qcow2"
        say(f"making an image of {plan.size} MiB with {plan.data} MiB of data")
        plan.image.write(image)
        waves = {NOTHING: wave(NOTHING, plan, image, folder, nova)}
        base, base_s = make_base(folder, image, plan)
        waves[VIRTMAN] = wave(VIRTMAN, plan, base, folder, nova)
        base.unlink()
        waves |= {way: wave(way, plan, image, folder, nova) for way in OTHERS}
        return {"base_s": base_s, "base_bytes": image.stat().st_size, "waves": waves}


def bytes_moved(moved: dict[str, int]) -> int:
    """Bytes that crossed a link: downloads, what hosts fetched, and what agents read for anything but serving."""
    return sum(moved.get(name, 0) for name in ("downloaded", "fetched", "agents_read"))


def headline(waves: dict[str, Any]) -> dict[str, Any]:
    """Seconds until the last disk is ready, and bytes, of each way.

    ``active_s``: until the last server is active; ``slowest_disk_s``: of the steps of Nova in which a server gets its
    disk.
    """
    found: dict[str, Any] = {"nova_alone_active_s": waves[NOTHING]["s"]}
    for way in (VIRTMAN, *OTHERS):
        one = waves[way]
        found[f"{way}_s"], found[f"{way}_bytes"] = one["last_disk_s"], bytes_moved(one["moved"])
        found[f"{way}_active_s"] = one["s"]
        found[f"{way}_slowest_disk_s"] = one["disk_s"]["max"]
        found[f"{way}_boot_set_s"] = one["boot_set_s"]
        found[f"{way}_boot_set_bytes"] = bytes_moved(one["boot_set_moved"])
    return found


def ratios(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By other way: how many times sooner ours is, also by its slowest disk; and the share of the bytes."""
    return {
        way: {
            "times_sooner": found[f"{way}_s"] / found["virtman_s"],
            "disk_times_sooner": found[f"{way}_slowest_disk_s"] / found["virtman_slowest_disk_s"],
            "share_of_bytes": found["virtman_bytes"] / found[f"{way}_bytes"],
            "times_sooner_with_boot_set": found[f"{way}_boot_set_s"] / found["virtman_boot_set_s"],
            "share_of_bytes_with_boot_set": found["virtman_boot_set_bytes"] / found[f"{way}_boot_set_bytes"],
        }
        for way in OTHERS
    }


def missed(found: dict[str, dict[str, float]]) -> list[str]:
    """What is not as the bars say."""
    late = [f"{one['times_sooner']:.1f} times sooner than {way}; bar: {SECONDS_BAR:g}"
            for way, one in found.items() if one["times_sooner"] < SECONDS_BAR]  # fmt: skip
    much = [f"{one['share_of_bytes']:.3f} of the bytes of {way}; bar: {BYTES_BAR:g}"
            for way, one in found.items() if one["share_of_bytes"] > BYTES_BAR]  # fmt: skip
    return late + much


def print_result(plan: Plan, found: dict[str, Any], waves: dict[str, Any]) -> None:
    """A table for people."""
    compared = ratios(found)
    alone = waves[NOTHING]
    rows = [[NAMES[NOTHING], "", f"{alone['s']:.1f}", *[""] * 4, f"{alone['cpu_s']['machine']:.0f}"]]
    rows += [
        [NAMES[way], f"{found[f'{way}_s']:.1f}", f"{found[f'{way}_active_s']:.1f}",
         f"{found[f'{way}_bytes'] / MIB:.1f}", f"{found[f'{way}_slowest_disk_s']:.1f}",
         f"{found[f'{way}_boot_set_s']:.1f}", f"{found[f'{way}_boot_set_bytes'] / MIB:.1f}",
         f"{waves[way]['cpu_s']['machine']:.0f}"]
        for way in (VIRTMAN, *OTHERS)
    ]  # fmt: skip
    for way, one in compared.items():
        rows.append([
            f"ours against {way}", f"{one['times_sooner']:.1f} times", "", f"{one['share_of_bytes']:.5f}",
            f"{one['disk_times_sooner']:.1f} times", f"{one['times_sooner_with_boot_set']:.1f} times",
            f"{one['share_of_bytes_with_boot_set']:.5f}", "",
        ])  # fmt: skip
    settings = ", ".join(f"{name} {value}" for name, value in plan.settings().items())
    print_table(
        f"{plan.servers} servers on {plan.computes} computes, {plan.data} MiB of data in an image (qcow2) of"
        f" {plan.size} MiB; bars: {SECONDS_BAR:g} times sooner, {BYTES_BAR:g} of the bytes\n"
        f"Nova: {settings}; Cinder copies {plan.cinder_at_once} volumes at a time",
        ["way", "last disk, s", "all active, s", "MiB", "slowest disk, s", f"+ {BOOT_SET_MIB} MiB read, s", "MiB",
         "processors, s"],
        rows,
    )  # fmt: skip


@click.command(context_settings=SETTINGS)
@click.option("--servers", type=click.IntRange(min=1), default=60, show_default=True)
@click.option("--computes", type=click.IntRange(min=1), default=4, show_default=True)
@click.option(
    "--size", type=click.IntRange(min=GIB_MIB), default=2048, show_default=True, help="Of the image, in MiB: whole GiB."
)
@click.option(
    "--data", type=click.IntRange(min=RUN_MIB), default=1024, show_default=True,
    help=f"MiB of the image that are data, a multiple of {RUN_MIB}; the others are holes.",
)  # fmt: skip
@click.option(
    "--cinder-at-once", type=click.IntRange(min=1), default=4, show_default=True,
    help="Volumes that Cinder copies at the same time.",
)  # fmt: skip
def main(servers: int, computes: int, size: int, data: int, cinder_at_once: int) -> None:
    """Start a wave of servers by Nova: from a base volume, by the image backend, and from copied volumes.

    Needs root. Writes build/nova.json and prints a table. Ends with exit code 1 if ours is less than 10 times sooner
    than another way, or moves more than a tenth of its bytes.

    \b
    Examples:
      python -m benchmarks.nova
      python -m benchmarks.nova --servers 8 --computes 2 --data 64
    """
    if data % RUN_MIB or data > size:
        raise click.UsageError(f"--data must be a multiple of {RUN_MIB} and at most --size")
    if size % GIB_MIB:
        raise click.UsageError(f"--size must be a multiple of {GIB_MIB}: Cinder's volumes have whole GiB")
    with benchmark():
        plan = Plan(servers, computes, size, data, cinder_at_once)
        BUILD.mkdir(exist_ok=True)
        check_room(plan, BUILD)
        measured = measure(plan)
        found = headline(measured["waves"])
        print_result(plan, found, measured["waves"])
        figures = {
            **base_figures(plan), **found, "ratios": ratios(found),
            "bars": {"times_sooner": SECONDS_BAR, "share_of_bytes": BYTES_BAR}, **measured,
        }  # fmt: skip
        finish("nova", figures, missed(ratios(found)))


if __name__ == "__main__":
    sys.exit(main())
