"""How long one VM takes to its login prompt through three levels of hosts, cold and warm, against a local file.

A chain origin -> host-1 -> host-2 -> host-3, and one VM at a time on the last host, on an otherwise idle machine: first
with every cache of the chain empty, then with the host's cache filled. The same definition boots from an overlay on the
local raw file right before and after, so that a drift of the machine's speed cancels in the ratios.
"""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.command import SETTINGS, benchmark, finish
from benchmarks.errors import TookTooLong
from benchmarks.figures import print_table, spread
from benchmarks.processes import say
from lab.cluster import Cluster, proven_accel
from lab.guest import guest
from lab.libvirt import PrivateLibvirt
from lab.localboot import LocalVm
from lab.login import wait_login
from lab.process import attempts
from lab.tools import BUILD

IMAGE = "guest"
LEVELS = 3
HOW = {"memory": 512}
LOGIN_TIMEOUT = 300.0
FORGET_TIMEOUT = 60.0
COLD_BAR, WARM_BAR = 1.05, 1.02
"""What the ratios to the local boot are to be at most."""


def boot(cluster: Cluster) -> float:
    """Seconds from the request to the login prompt of a new VM on the last host; the VM is gone again."""
    agent = cluster.agents[LEVELS]
    started = time.monotonic()
    answer = agent.boot("vm", IMAGE, **HOW)
    seconds = wait_login("vm", Path(answer.machine.console_log), LOGIN_TIMEOUT) - started
    agent.destroy("vm")
    return seconds


def place(cluster: Cluster) -> None:
    """All hosts take their places in the chain and read nothing."""
    for host in range(1, LEVELS + 1):
        cluster.agents[host].create(f"place-{host}", IMAGE)


def forget(cluster: Cluster) -> None:
    """No host has the image or a byte of it. Raises TookTooLong."""
    for host in range(1, LEVELS + 1):
        cluster.agents[host].destroy(f"place-{host}")
    for _ in attempts(FORGET_TIMEOUT):
        # A host keeps what its children need until Volt has told it that they left: from the leaf up, and again.
        for host in range(LEVELS, 0, -1):
            cluster.agents[host].gc()
        if not any(cluster.agents[host].status().images for host in range(1, LEVELS + 1)):
            return
    raise TookTooLong(f"a host still has the image after {FORGET_TIMEOUT:.0f} s")


def one_round(cluster: Cluster, local: LocalVm, file: Path) -> dict[str, float]:
    """Seconds of a local, a cold, a warm and again a local boot."""
    before = local.boot(file, LOGIN_TIMEOUT)
    place(cluster)
    cold = boot(cluster)
    warm = boot(cluster)
    after = local.boot(file, LOGIN_TIMEOUT)
    forget(cluster)
    return {"local": statistics.mean((before, after)), "cold": cold, "warm": warm}


def measure(rounds: int) -> dict[str, Any]:
    """All rounds on one cluster."""
    made = guest()
    folder = BUILD / "one_boot"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    accel = proven_accel(made.kernel)
    with (
        PrivateLibvirt(folder / "libvirt") as libvirt,
        Cluster(folder, LEVELS + 1, libvirt=libvirt.uri, accel=accel, volt_options=["--fanout", "1"]) as cluster,
    ):
        cluster.agents[0].publish(IMAGE, made.disk)
        local = LocalVm(libvirt.uri, "local", cluster.agents[0], IMAGE, folder / "local", **HOW)
        seconds = []
        for number in range(rounds):
            seconds.append(one_round(cluster, local, made.disk))
            say(f"round {number + 1}: " + ", ".join(f"{kind} {value:.2f} s" for kind, value in seconds[-1].items()))
    ratios = {kind: spread([each[kind] / each["local"] for each in seconds]) for kind in ("cold", "warm")}
    return {"accel": accel, "levels": LEVELS, "seconds": seconds, "ratio_to_local": ratios}


@click.command(context_settings=SETTINGS)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Each takes four boots.")
def main(rounds: int) -> None:
    """Time one VM's boot through three levels, cold and warm, against a local file.

    Writes build/one_boot.json and prints a table.

    \b
    Example:
      python -m benchmarks.one_boot --rounds 3
    """
    with benchmark():
        figures = measure(rounds)
        print_table(
            f"Boot through {LEVELS} levels over the local boot; bars: {COLD_BAR} cold, {WARM_BAR} warm",
            ["", "min", "median", "max"],
            [
                [kind, *(f"{ratio[which]:.3f}" for which in ("min", "median", "max"))]
                for kind, ratio in figures["ratio_to_local"].items()
            ],
        )
        finish("one_boot", figures, [])


if __name__ == "__main__":
    main()
