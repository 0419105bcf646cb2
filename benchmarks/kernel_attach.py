"""Attach hosts of the kernel stack that start together, in a chain and straight to the origin.

Guests of the kernel lab. All hosts are told to create a VM's disk at the same moment; each is done when it has read a
block of its disk that nobody has read before. Chain and star alternate on the same guests, so that both meet the same
machine, and between them every host forgets the image and what it held of it.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from benchmarks.command import EXPECTED, SETTINGS, benchmark, finish
from benchmarks.errors import Failed, TookTooLong
from benchmarks.figures import MIB, print_table, spread
from benchmarks.inside.content import BLOCK
from benchmarks.kernellab import KernelLab, agent_log, begin, kernel_lab
from benchmarks.processes import say
from lab.kernel.machine import Machine
from lab.process import attempts

BAR = 1.3
"""Times that a chain may take as long as a star."""

VM = "vm"
SIZES = {"chain": 16 * MIB, "star": 17 * MIB}
FORGET_LIMIT = 120.0

_DROP_IN = "/run/systemd/system/virtman-agent.service.d/log.conf"
_VERBOSE = "[Service]\nExecStart=\nExecStart=/usr/local/bin/virtman agent --log-level debug\n"
_STEP, _PATH = re.compile(r"step (\S+)$"), re.compile(r"paths are now \d")
_FIRST_STEP, _LAST_STEP = "create:recorded", "create:done"


class Callers:
    """Context manager: a program on each host that calls its agent."""

    def __init__(self, lab: KernelLab) -> None:
        self._lab = lab
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Callers:
        """Start them all; they are ready. Raises Failed."""
        for host in self._lab.hosts:
            self._processes[host.name] = begin(host, "caller")
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        for process in self._processes.values():
            process.communicate()

    def together(self, calls: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """One call at each of these hosts, at the same time; their answers. Raises Failed."""
        for host, call in calls.items():
            told = self._processes[host].stdin
            assert told is not None
            told.write(json.dumps(call) + "\n")
            told.flush()
        with ThreadPoolExecutor(len(calls)) as pool:
            return dict(zip(calls, pool.map(self._answer, calls), strict=True))

    def _answer(self, host: str) -> Any:
        said = self._processes[host].stdout
        assert said is not None
        line = said.readline()
        if not line:
            raise Failed(f"the program on {host} ended with exit code {self._processes[host].wait()}")
        return json.loads(line)


def log_steps(host: Machine) -> None:
    """Have a host's agent write down each step that it reaches. Raises CommandFailed."""
    host.run(["mkdir", "-p", _DROP_IN.rpartition("/")[0]])
    host.run(["tee", _DROP_IN], stdin=_VERBOSE)
    host.run(["systemctl", "daemon-reload"])
    host.run(["systemctl", "restart", "virtman-agent.service"])


def steps(log: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Seconds from the beginning of the last create to each of its steps, and to the first path to a parent."""
    found: dict[str, float] = {}
    began = max((at for at, message in log if message.endswith(f"step {_FIRST_STEP}")), default=0.0)
    for at, message in log:
        step = "path" if _PATH.search(message) else (_STEP.findall(message) or [""])[0]
        if step and at >= began and _LAST_STEP not in found:
            found.setdefault(step, at - began)
    return found


def attach(lab: KernelLab, callers: Callers, image: str) -> dict[str, Any]:
    """Seconds of each host, and of all, and when each reached which step."""
    step = SIZES[image] // BLOCK // (len(lab.hosts) + 1)
    calls = {host.name: ["create", VM, image, number * step] for number, host in enumerate(lab.hosts, start=1)}
    clocks = [float(host.run(["date", "+%s"])) for host in lab.hosts]
    began = time.monotonic()
    answers = callers.together(calls)
    return {
        "shape": image,
        "all_s": time.monotonic() - began,
        "each_s": {host: answer["seconds"] for host, answer in answers.items()},
        "steps_s": {host.name: steps(agent_log(host, clock)) for host, clock in zip(lab.hosts, clocks, strict=True)},
    }


def forget(callers: Callers, lab: KernelLab) -> None:
    """No host has an image or a byte of it. Raises TookTooLong."""
    hosts = [host.name for host in lab.hosts]
    callers.together({host: ["destroy", VM] for host in hosts})
    for _ in attempts(FORGET_LIMIT):
        # A host keeps what its children need until Volt has told it that they left.
        if not any(answer["images"] for answer in callers.together({host: ["gc"] for host in hosts}).values()):
            return
    raise TookTooLong(f"a host still has an image after {FORGET_LIMIT:.0f} s")


def run(hosts: int, rounds: int, failures: list[str]) -> dict[str, Any]:
    """Rounds of both shapes on one lab; one that fails is the last, and goes to ``failures``."""
    done: list[dict[str, Any]] = []
    with kernel_lab("kernel_attach", hosts, ["VOLT_FANOUT=1"], failures) as lab:
        lab.publish("chain", SIZES["chain"])
        lab.services.restart_volt([f"VOLT_FANOUT={hosts}"])
        lab.publish("star", SIZES["star"])
        with ThreadPoolExecutor(hosts) as pool:
            list(pool.map(log_steps, lab.hosts))
        try:
            with Callers(lab) as callers:
                for image in SIZES:
                    first = round_text(attach(lab, callers, image))
                    say(f"not counted, since it makes what outlives a stack: {first}")
                    forget(callers, lab)
                for number in range(rounds):
                    for image in SIZES:
                        done.append(attach(lab, callers, image))
                        say(f"round {number + 1} of {rounds}: {round_text(done[-1])}")
                        forget(callers, lab)
        except EXPECTED as error:
            failures.append(f"after {len(done)} attaches: {error}")
    shapes = {image: [each for each in done if each["shape"] == image] for image in SIZES}
    if not all(shapes.values()):
        raise Failed("; ".join(failures))
    return {"shapes": {image: summary(each) for image, each in shapes.items()}, "ratio": ratio(shapes), "rounds": done}


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All attaches of one shape."""
    return {
        "all_s": spread([each["all_s"] for each in rounds]),
        "each_s": spread([seconds for each in rounds for seconds in each["each_s"].values()]),
        "steps_s": step_spreads([host for each in rounds for host in each["steps_s"].values()]),
    }


def step_spreads(hosts: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """When hosts reached each step, in the order of the medians."""
    names = {name for host in hosts for name in host}
    found = {name: spread([host[name] for host in hosts if name in host]) for name in names}
    return dict(sorted(found.items(), key=lambda item: item[1]["median"]))


def ratio(shapes: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, float]:
    """Chain over star, each round against the star that followed it."""
    pairs = zip(shapes["chain"], shapes["star"], strict=False)
    return spread([chain["all_s"] / star["all_s"] for chain, star in pairs])


def round_text(done: dict[str, Any]) -> str:
    """One attach for people."""
    each = done["each_s"].values()
    return f"{done['shape']}: all in {done['all_s']:.2f} s, one in {statistics.mean(each):.2f} s on average"


@click.command(context_settings=SETTINGS)
@click.option("--hosts", type=click.IntRange(min=2), default=4, show_default=True, help="Hosts that start together.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Each takes both shapes.")
def main(hosts: int, rounds: int) -> None:
    """Time the attach of hosts of the kernel stack in a chain against as many straight to the origin.

    Writes build/kernel_attach.json and prints a table.

    \b
    Example:
      python -m benchmarks.kernel_attach --hosts 4 --rounds 3
    """
    with benchmark():
        failures: list[str] = []
        figures = run(hosts, rounds, failures)
        print_table(
            f"{hosts} hosts attach together; a chain may take {BAR:g} times as long as a star",
            ["", "min", "median", "max"],
            [
                [name, *(f"{values[which]:.2f}" for which in ("min", "median", "max"))]
                for name, values in {
                    **{f"{image}: all, s": each["all_s"] for image, each in figures["shapes"].items()},
                    **{f"{image}: one host, s": each["each_s"] for image, each in figures["shapes"].items()},
                    "chain over star": figures["ratio"],
                }.items()
            ],
        )
        for image, each in figures["shapes"].items():
            print_table(
                f"{image}: seconds from the beginning of a create to each step",
                ["", "min", "median", "max"],
                [
                    [name, *(f"{values[which]:.2f}" for which in ("min", "median", "max"))]
                    for name, values in each["steps_s"].items()
                ],
            )
        finish("kernel_attach", figures, failures)


if __name__ == "__main__":
    main()
