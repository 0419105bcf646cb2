"""Kill the parent of a VM's host in the kernel stack, again and again, and see what the VM notices.

Guests of the kernel lab with a tree of fanout 2: the last host has two other hosts and the origin as parents. Its VM's
disk is read past the page cache, only blocks that no host below the origin has read before, and every byte is compared.
In each round the parent that it reads from goes, in turn with a word (its target is removed, which closes the
connection), without one (its guest loses power), and not at all: it hangs, behind a connection that is well. Then it
comes back, and the next round begins.

Beside it another disk of the same guest is read at the same pace. It depends on nobody: how long its reads take tells
how long the emulated guest itself stood still.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from typing import Any

import click

from benchmarks.command import EXPECTED, SETTINGS, benchmark, finish
from benchmarks.errors import Failed, TookTooLong
from benchmarks.figures import print_table, spread
from benchmarks.inside.content import BLOCK
from benchmarks.inside.reader import PACE_S
from benchmarks.kernellab import KernelLab, agent_log, begin, kernel_lab, program, result, usable_parents
from benchmarks.processes import say
from lab.kernel.machine import COMMAND_TIMEOUT, Machine
from lab.kernel.services import agent
from lab.process import attempts

IMAGE, VM = "killed", "vm"
SERVED = f"virtman-export-{IMAGE}"
"""The map by which a host serves its children."""

HOSTS = 3
PARENTS = 3
SETTINGS_OF_VOLT = ["VOLT_FANOUT=2", "VOLT_LEASE=600"]
"""With a lease that outlasts a round nobody moves in the tree, and the last host keeps two parents."""

LEAD_S, WATCH_S = 3.0, 9.0
"""Seconds of reading before a kill and from then on."""

BLOCKS_PER_ROUND = int((LEAD_S + WATCH_S) / PACE_S)
CONTROL_DISK = "/dev/vda"
RETURN_LIMIT = 240.0
BARS_S = {"word": 1.0, "power": 3.0, "hang": 2.5}
"""Longest stall by the way a parent goes."""

_LOST, _FOLLOWED = re.compile(r"parent \S+ lost"), re.compile(r"paths are now \d")


def kill(victim: Machine, way: str) -> None:
    """Have a parent go. Raises CommandFailed."""
    if way == "word":
        victim.run(program("untarget", IMAGE))
    elif way == "hang":
        victim.run(["dmsetup", "suspend", SERVED])
    else:
        victim.cut_power()


def bring_back(lab: KernelLab, victim: Machine, way: str) -> None:
    """Start a guest without power again; a target comes back by itself. Raises NotReady, CommandFailed."""
    if way == "hang":
        victim.run(["dmsetup", "resume", SERVED])
    if way == "power":
        victim.start()
        victim.wait_up()
        lab.services.start_agent(victim)


def longest(requests: Sequence[Sequence[float]]) -> float:
    """Seconds of the longest of these requests."""
    return max((seconds for _, seconds in requests), default=0.0)


def phases(requests: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Seconds of the longest request before the parent may have gone, and of the longest after that."""
    end = requests[0][0] + LEAD_S
    before = [request for request in requests if sum(request) < end]
    return longest(before), longest(requests[len(before) :])


def swap(log: Sequence[tuple[float, str]]) -> dict[str, float | None]:
    """When the agent noticed first that a parent is lost, and seconds from then until the map reads by another."""
    noticed = next((at for at, message in log if _LOST.search(message)), None)
    if noticed is None:
        return {"noticed_at": None, "swap_s": None}
    followed = next((at for at, message in log if at >= noticed and _FOLLOWED.search(message)), None)
    return {"noticed_at": noticed, "swap_s": None if followed is None else followed - noticed}


def first_parent(reader: Machine, *, origin: bool) -> str:
    """Whom a host reads from, once all parents are usable, and it is not the origin, unless that may go.

    Volt is there, and what all others read. Raises TookTooLong.
    """
    for _ in attempts(RETURN_LIMIT):
        first = usable_parents(reader, IMAGE, PARENTS, RETURN_LIMIT)[0]
        if origin or first != "origin":
            return first
    raise TookTooLong(f"{reader.name} reads from the origin")


def kill_round(lab: KernelLab, way: str, first: int, step: int) -> dict[str, Any]:
    """Have the parent go that the last host reads from, under I/O, and bring it back."""
    reader = lab.hosts[-1]
    if way == "hang":  # else the parent that hung last would be in quarantine
        reader.run(["systemctl", "restart", "virtman-agent.service"])
    victim = lab.machines[first_parent(reader, origin=way == "word")]
    seconds = str(LEAD_S + WATCH_S)
    control = begin(reader, "reader", "control", CONTROL_DISK, seconds)
    reading = begin(reader, "reader", "image", f"/dev/mapper/virtman-vm-{VM}", seconds, str(first), str(step))
    time.sleep(LEAD_S)
    kill(victim, way)
    told, beside = (result(process, WATCH_S + COMMAND_TIMEOUT) for process in (reading, control))
    log = agent_log(reader, told["requests"][0][0])
    bring_back(lab, victim, way)
    before_s, stall_s = phases(told["requests"])
    _, control_s = phases(beside["requests"])
    return {
        "way": way,
        "killed": victim.name,
        "before_s": before_s,
        "stall_s": stall_s,
        "control_s": control_s,
        **swap(log),
        "stalled_at": max(told["requests"], key=lambda request: request[1])[0],
        "requests": len(told["requests"]),
        "errors": told["errors"],
        "wrong_blocks": told["wrong"],
    }


def run(rounds: int, ways: Sequence[str], failures: list[str]) -> dict[str, Any]:
    """``rounds`` rounds of each way. One that fails is the last, and goes to ``failures``."""
    kills = [way for _ in range(rounds) for way in ways]
    done: list[dict[str, Any]] = []
    with kernel_lab("kernel_kill", HOSTS, SETTINGS_OF_VOLT, failures) as lab:
        lab.publish(IMAGE, len(kills) * BLOCKS_PER_ROUND * BLOCK)
        for host in lab.hosts:
            agent(host).create(VM, IMAGE)
        try:
            for number, way in enumerate(kills):
                done.append(kill_round(lab, way, number, len(kills)))
                say(f"round {number + 1} of {len(kills)}: {round_text(done[-1])}")
        except EXPECTED as error:
            failures.append(f"after {len(done)} rounds: {error}")
    if not done:
        raise Failed("; ".join(failures))
    return {"ways": {way: summary([each for each in done if each["way"] == way]) for way in ways}, "rounds": done}


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All rounds of one way."""
    swaps = [each["swap_s"] for each in rounds if each["swap_s"] is not None]
    return {
        **{name: spread([each[name] for each in rounds]) for name in ("before_s", "stall_s", "control_s") if rounds},
        **({"swap_s": spread(swaps)} if swaps else {}),
        "requests": sum(each["requests"] for each in rounds),
        "errors": sum(len(each["errors"]) for each in rounds),
        "wrong_blocks": sum(len(each["wrong_blocks"]) for each in rounds),
    }


def round_text(done: dict[str, Any]) -> str:
    """One round for people."""
    swapped = "the agent noticed nothing" if done["swap_s"] is None else f"swapped in {done['swap_s']:.3f} s"
    return (
        f"{done['killed']} went ({done['way']}), stall {done['stall_s']:.3f} s, before {done['before_s']:.3f} s,"
        f" beside {done['control_s']:.3f} s, {swapped}, {done['requests']} requests, {len(done['errors'])} errors,"
        f" {len(done['wrong_blocks'])} wrong blocks"
    )


NAMES = {
    "stall_s": "longest read after a parent went",
    "before_s": "longest read before that (baseline)",
    "control_s": "longest read of the disk beside it (baseline)",
    "swap_s": "from the loss noticed to another parent in the map",
}


def table_rows(ways: dict[str, Any]) -> list[list[str]]:
    """Rows of the table, way by way."""
    return [
        [f"{way}: {NAMES[name]}", *(f"{values[name][which]:.3f}" for which in ("min", "median", "p95", "max"))]
        for (way, values), name in itertools.product(ways.items(), NAMES)
        if name in values
    ]


@click.command(context_settings=SETTINGS)
@click.option("--rounds", type=click.IntRange(min=1), default=10, show_default=True, help="Kills of each way.")
@click.option("--way", "ways", multiple=True, type=click.Choice(list(BARS_S)), help="Only this way.  [default: all]")
def main(rounds: int, ways: tuple[str, ...]) -> None:
    """Have parents of the kernel stack go under verified reads of a VM's disk: with a word, without power, and hang.

    Writes build/kernel_kill.json and prints a table. Ends with exit code 1 after an I/O error or a wrong byte, or if a
    read waited for longer than the bar.

    \b
    Examples:
      python -m benchmarks.kernel_kill                       # about 35 minutes
      python -m benchmarks.kernel_kill --rounds 2 --way power
    """
    with benchmark():
        failures: list[str] = []
        figures = run(rounds, ways or list(BARS_S), failures)
        totals = {name: sum(each[name] for each in figures["ways"].values()) for name in ("errors", "wrong_blocks")}
        print_table(
            f"{len(figures['rounds'])} kills: {totals['errors']} errors, {totals['wrong_blocks']} wrong blocks; bars:"
            f" a stall of {BARS_S['word']:g} s with a word, {BARS_S['power']:g} s without power,"
            f" {BARS_S['hang']:g} s when it hangs",
            ["seconds", "min", "median", "p95", "max"],
            table_rows(figures["ways"]),
        )
        failures += [
            f"{way}: a read waited for longer than {BARS_S[way]:g} s"
            for way, each in figures["ways"].items()
            if each["stall_s"]["max"] > BARS_S[way]
        ]
        if any(totals.values()):
            failures.append("the VM noticed: it got errors or wrong bytes")
        finish("kernel_kill", figures, failures)


if __name__ == "__main__":
    main()
