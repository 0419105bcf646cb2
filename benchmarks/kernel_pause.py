"""Have the network of all hosts of the kernel stack pause under reads, and see what VMs notice.

Guests of the kernel lab with a tree of fanout 2. On each host a VM's disk is read past the page cache, only blocks that
nobody below the origin has read before, and every byte is compared. In each round the private network of all guests is
down for a while. Reads wait meanwhile; told is for how long after its end, and when hosts logged in to parents again.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from benchmarks.command import EXPECTED, SETTINGS, benchmark, finish
from benchmarks.errors import Failed
from benchmarks.figures import print_table
from benchmarks.inside.content import BLOCK
from benchmarks.inside.reader import PACE_S
from benchmarks.kernellab import KernelLab, begin, kernel_lab, result, usable_parents
from benchmarks.processes import say
from lab.kernel.machine import COMMAND_TIMEOUT, Machine
from lab.kernel.services import agent

IMAGE, VM = "paused", "vm"
HOSTS = 3
PARENTS = (1, 1, 3)
"""Of each host: one of the first level has the origin alone."""

SETTINGS_OF_VOLT = ["VOLT_FANOUT=2", "VOLT_LEASE=600"]
LEAD_S, WATCH_S = 3.0, 9.0
"""Seconds of reading before a pause and from its end on."""

TOLD_S = 40.0
"""Seconds within which Volt is told of a parent that stays away (drivers/attach/iscsi.py, PATIENCE), and answers."""

Parents = dict[str, set[str]]
"""Whom each host may read from."""

LENGTHS_S = (1.0, 2.0, 5.0, 20.0)
BAR_S = 6.0
"""Seconds after the end of a pause within which reads go on."""

BLOCKS_PER_ROUND = int((LEAD_S + WATCH_S) / PACE_S)
READY_LIMIT = 240.0
_LOGIN = re.compile("is operational (now|after recovery)")
"""What iscsid says of a new session, and of one that has its connection again (open-iscsi: usr/initiator.c)."""


def on_all(lab: KernelLab, what: str) -> dict[str, float]:
    """Add what loses all that guests send, or delete it, at the same time; returns each guest's time then.

    Raises CommandFailed.
    """
    rule = f"tc qdisc {what} dev eth1 root" + (" netem loss 100%" if what == "add" else "")
    machines = lab.machines.values()
    with ThreadPoolExecutor(len(machines)) as pool:
        done = pool.map(lambda machine: machine.run(["sh", "-c", f"{rule} && date +%s.%N"]), machines)
        return dict(zip(lab.machines, map(float, done), strict=True))


def logins(machine: Machine, since: float) -> list[float]:
    """When a guest was logged in to a parent, by its time since the epoch. Raises CommandFailed."""
    journal = ["journalctl", "--identifier", "iscsid", "--output", "json", "--since", f"@{since:.0f}"]
    entries = [json.loads(line) for line in machine.run(journal).splitlines() if line.startswith("{")]
    times = [int(entry["__REALTIME_TIMESTAMP"]) / 1e6 for entry in entries if _LOGIN.search(str(entry["MESSAGE"]))]
    return [at for at in times if at >= since]


def pause_round(lab: KernelLab, before: Parents, length: float, first: int, step: int) -> dict[str, Any]:
    """One pause, with a reader on each host."""
    seconds = str(LEAD_S + length + WATCH_S)
    disk = f"/dev/mapper/virtman-vm-{VM}"
    readers = [begin(host, "reader", "image", disk, seconds, str(first), str(step)) for host in lab.hosts]
    time.sleep(LEAD_S)
    on_all(lab, "add")
    time.sleep(length)
    times = on_all(lab, "del")
    ends = [times[host.name] for host in lab.hosts]
    told = [result(reader, length + WATCH_S + COMMAND_TIMEOUT) for reader in readers]
    after = [waited_after(each["requests"], end) for each, end in zip(told, ends, strict=True)]
    again = sorted(at - end for host, end in zip(lab.hosts, ends, strict=True) for at in logins(host, end - length))
    return {
        "pause_s": length,
        "moved": moved(lab, before),
        "after_s": max(after),
        "logins": again,
        "requests": sum(len(each["requests"]) for each in told),
        "errors": [error for each in told for error in each["errors"]],
        "wrong_blocks": [block for each in told for block in each["wrong"]],
    }


def moved(lab: KernelLab, before: Parents) -> list[str]:
    """The hosts that have other parents than before. Raises TookTooLong."""
    return [host for host, parents in parents_of(lab).items() if parents != before[host]]


def parents_of(lab: KernelLab) -> Parents:
    """Whom each host may read from, once all are usable. Raises TookTooLong."""
    return {
        host.name: set(usable_parents(host, IMAGE, parents, READY_LIMIT))
        for host, parents in zip(lab.hosts, PARENTS, strict=True)
    }


def waited_after(requests: list[list[float]], end: float) -> float:
    """Seconds of the longest wait from the end of a pause on. Raises Failed if no read waited then."""
    if not any(at < end < at + seconds for at, seconds in requests):
        raise Failed("no read waited at the end of the pause")
    return max(min(seconds, at + seconds - end) for at, seconds in requests if at + seconds > end)


def run(rounds: int, failures: list[str]) -> list[dict[str, Any]]:
    """``rounds`` rounds of each length. One that fails is the last, and goes to ``failures``."""
    lengths = [length for _ in range(rounds) for length in LENGTHS_S]
    done: list[dict[str, Any]] = []
    with kernel_lab("kernel_pause", HOSTS, SETTINGS_OF_VOLT, failures) as lab:
        lab.publish(IMAGE, len(lengths) * BLOCKS_PER_ROUND * BLOCK)
        for host in lab.hosts:
            agent(host).create(VM, IMAGE)
        try:
            before = parents_of(lab)
            for number, length in enumerate(lengths):
                done.append(pause_round(lab, before, length, number, len(lengths)))
                say(f"round {number + 1} of {len(lengths)}: {round_text(done[-1])}")
            say("waiting for what Volt may be told late")
            time.sleep(TOLD_S)
            done[-1]["moved"] = moved(lab, before)
        except EXPECTED as error:
            failures.append(f"after {len(done)} rounds: {error}")
    if not done:
        raise Failed("; ".join(failures))
    return done


def spread_text(times: list[float]) -> str:
    """When the logins were, for people."""
    return f"{len(times)}, {times[0]:.1f} to {times[-1]:.1f} s after its end" if times else "none"


def round_text(done: dict[str, Any]) -> str:
    """One round for people."""
    return (
        f"a pause of {done['pause_s']:g} s, reads go on after {done['after_s']:.2f} s,"
        f" logins: {spread_text(done['logins'])}, {done['requests']} requests, {len(done['errors'])} errors,"
        f" {len(done['wrong_blocks'])} wrong blocks"
    )


@click.command(context_settings=SETTINGS)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Pauses of each length.")
def main(rounds: int) -> None:
    """Have the network of all hosts pause for 1, 2, 5 and 20 seconds under verified reads of VMs' disks.

    Writes build/kernel_pause.json and prints a table. Ends with exit code 1 after an I/O error or a wrong byte, when
    reads went on later than the bar, or where a host has other parents afterwards.

    \b
    Examples:
      python -m benchmarks.kernel_pause                # about 15 minutes
      python -m benchmarks.kernel_pause --rounds 1
    """
    with benchmark():
        failures: list[str] = []
        done = run(rounds, failures)
        print_table(
            f"Pauses of the network; bar: reads go on {BAR_S:g} s after the end",
            ["pause", "reads go on after", "logins", "errors", "wrong blocks"],
            [
                [
                    f"{each['pause_s']:g} s",
                    f"{each['after_s']:.2f} s",
                    spread_text(each["logins"]),
                    str(len(each["errors"])),
                    str(len(each["wrong_blocks"])),
                ]
                for each in done
            ],
        )
        if any(each["errors"] or each["wrong_blocks"] for each in done):
            failures.append("a VM noticed: it got errors or wrong bytes")
        if max(each["after_s"] for each in done) > BAR_S:
            failures.append(f"a read waited for longer than {BAR_S:g} s after the end")
        failures += [f"{host} has other parents after a pause" for each in done for host in each["moved"]]
        finish("kernel_pause", {"rounds": done}, failures)


if __name__ == "__main__":
    main()
