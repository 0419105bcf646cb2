"""What an agent of the kernel stack costs that has many images attached and nothing to do.

Two guests of the kernel lab: an origin with images, and a host with a VM of each, which nobody reads. Their processors
are emulated. So a fixed piece of Python is timed on a guest and on this machine, and the agent's share of a core is
told as it is, and divided by how much longer that piece took. Beside the agent something counts, at the lowest
priority: a machine may take the memory of a guest that sleeps, and its agent would be charged for the way back.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import click

from benchmarks.command import SETTINGS, benchmark, finish
from benchmarks.figures import MIB, print_table
from benchmarks.kernellab import KernelLab, kernel_lab, program
from benchmarks.processes import say
from lab.kernel.machine import Machine
from lab.kernel.services import agent
from lab.tools import CHECKOUT

BAR = 0.02
"""Of a core, by this machine's processor."""

WARM = 10.0
"""Seconds for which something counts before the agent is watched."""

_TICKS = 100  # of a second, in Debian's kernels: getconf CLK_TCK


def ticks(machine: Machine) -> int:
    """Processor time of a guest's agent and its programs so far, in hundredths of a second. Raises CommandFailed."""
    pid = machine.run(["systemctl", "show", "--property=MainPID", "--value", "virtman-agent.service"]).strip()
    fields = machine.run(["cat", f"/proc/{pid}/stat"]).rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))  # proc(5): its own, and that of children that have ended


def share(machine: Machine, seconds: float) -> float:
    """Of a core, that a guest's agent takes. Raises CommandFailed."""
    counting = machine.begin(["timeout", f"{WARM + seconds}", "nice", "-n", "19", "sh", "-c", "while :; do :; done"])
    time.sleep(WARM)
    before, began = ticks(machine), time.monotonic()
    time.sleep(seconds)
    found = (ticks(machine) - before) / _TICKS / (time.monotonic() - began)
    counting.communicate()
    return found


def slowness(machine: Machine) -> float:
    """How many times longer a guest's processor takes for Python than this machine's. Raises CommandFailed."""
    here = [sys.executable, "-m", "benchmarks.inside.work"]
    real = min(float(subprocess.run(here, cwd=CHECKOUT, capture_output=True, check=True).stdout) for _ in range(3))
    return min(float(machine.run(program("work"))) for _ in range(3)) / real


def attach(lab: KernelLab, images: int) -> None:
    """A VM of each image. Raises CommandFailed, AgentError."""
    [host] = lab.hosts
    for number in range(images):
        lab.publish(f"image-{number}", MIB)
        agent(host).create(f"vm-{number}", f"image-{number}")


def measure(images: int, seconds: float, leftovers: list[str]) -> dict[str, Any]:
    """The host's agent without images and with them."""
    with kernel_lab("kernel_idle", 1, [], leftovers) as lab:
        [host] = lab.hosts
        none = share(host, seconds)
        say(f"attaching {images} images")
        attach(lab, images)
        say(f"watching for {seconds:.0f} s")
        found = {"no image": none, f"{images} images": share(host, seconds)}
        times = slowness(host)
    return {"emulated": found, "slower": times, "real": {name: value / times for name, value in found.items()}}


@click.command(context_settings=SETTINGS)
@click.option("--images", type=click.IntRange(min=1), default=50, show_default=True, help="Images that are attached.")
@click.option("--seconds", type=click.FloatRange(min=1), default=60.0, show_default=True, help="How long to watch.")
def main(images: int, seconds: float) -> None:
    """Watch an agent of the kernel stack that has nothing to do.

    Writes build/kernel_idle.json and prints a table. Ends with exit code 1 beyond the bar.

    \b
    Examples:
      python -m benchmarks.kernel_idle                 # about 15 minutes
      python -m benchmarks.kernel_idle --images 10 --seconds 30
    """
    with benchmark():
        failures: list[str] = []
        figures = measure(images, seconds, failures)
        print_table(
            f"An idle agent, on a processor that is emulated {figures['slower']:.1f} times slower; bar: {BAR:.0%}",
            ["with", "emulated core", "core"],
            [
                [name, f"{figures['emulated'][name]:.2%}", f"{figures['real'][name]:.2%}"]
                for name in figures["emulated"]
            ],
        )
        if max(figures["real"].values()) > BAR:
            failures.append(f"the agent takes more than {BAR:.0%} of a core")
        finish("kernel_idle", figures, failures)


if __name__ == "__main__":
    main()
