"""Kill hosts between a VM and the origin, again and again, and see what the VM notices.

A VM's disk on a host at depth 3 of a tree is read and written without a pause and every byte is compared. In each round
one of the hosts above loses its chunk store and its agent to SIGKILL at once: in turn the host that the VM's host
reads from, and the one above that. Later the agent is started again, the tree goes back to its order, and the next
round begins. With ``--way hang`` the chunk store is stopped instead, and goes on later: it hangs, its connections
are well.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.command import EXPECTED, SETTINGS, benchmark, finish
from benchmarks.disks import exported
from benchmarks.errors import Failed, NotBelow
from benchmarks.figures import MIB, print_table, spread
from benchmarks.hosts import chunk_store, host_status, parents_in_use, settled_places, started_cluster
from benchmarks.processes import say
from benchmarks.verifiedio import BLOCK, Request, VerifiedIo, wrong_blocks
from lab.cluster import Cluster

IMAGE, VM = "killed", "vm"
HOSTS = 8
VM_HOST = 7
"""With fanout 2 the seventh host is at depth 3: two hosts stand between it and the origin. It is not the last one,
because that one moves up when the lease of a killed host runs out.
"""

IMAGE_BYTES_PER_ROUND = 48 * MIB
LEAD_S, WATCH_S, REST_S = 1.0, 4.0, 1.0
"""Seconds of I/O before a kill, from the kill to the agent's next start, and after all hosts are in their places."""

HANG_BAR_S = 2.0
"""Longest read while a parent hangs: it comes last after a second (chunkd/src/fetch/route.rs)."""

ROLES = ("parent", "grandparent")
WAYS = ("kill", "hang")


def write_image(path: Path, size: int) -> None:
    """An image in which no two blocks are alike."""
    with path.open("wb") as file:
        for _ in range(size // MIB):
            file.write(os.urandom(MIB))


def above(cluster: Cluster, host: str) -> list[str]:
    """The two hosts between ``host`` and the origin, nearest first, once all are in their places. Raises NotBelow."""
    places = settled_places(cluster, IMAGE)
    parent = places[host].parent
    if places[host].depth < len(ROLES) + 1:
        raise NotBelow(f"{host} reads from {parent} at depth {places[host].depth - 1}: no two hosts stand above it")
    return [parent, places[parent].parent]


def longest_requests(requests: Sequence[Request], killed: float, restarted: float) -> dict[str, float]:
    """Longest requests in seconds: answered before the kill, answered after it, sent after the agent's start."""
    phases = {
        "longest_before_s": [request for request in requests if request.ended < killed],
        "stall_s": [request for request in requests if request.ended >= killed and request.began < restarted],
        "return_stall_s": [request for request in requests if request.began >= restarted],
    }
    return {name: max((r.ended - r.began for r in phase), default=0.0) for name, phase in phases.items()}


def kill_round(cluster: Cluster, host: str, role: int, io: VerifiedIo, way: str) -> dict[str, Any]:
    """Have one of the hosts above ``host`` go under I/O, and come back, and wait until the tree is in order."""
    victim = above(cluster, host)[role]
    number, store = cluster.names.index(victim), chunk_store(cluster, victim)
    with io:
        time.sleep(LEAD_S)
        killed = time.monotonic()
        if way == "kill":
            cluster.kill_agent(number)
        os.kill(store, signal.SIGKILL if way == "kill" else signal.SIGSTOP)
        time.sleep(WATCH_S)
        meanwhile = parents_in_use({host: host_status(cluster, host, IMAGE)})
        restarted = time.monotonic()
        if way == "kill":
            cluster.restart_agent(number)
        else:
            os.kill(store, signal.SIGCONT)
            # Each time as if for the first time: agents remember who hung, for longer each time.
            for child in range(1, len(cluster.names)):
                cluster.restart_agent(child)
        settled_places(cluster, IMAGE)
        time.sleep(REST_S)
    return {
        "killed": victim,
        "role": ROLES[role],
        "parent_meanwhile": meanwhile.get(host),
        **longest_requests(io.requests, killed, restarted),
        "requests": len(io.requests),
        "compared_bytes": io.compared_bytes,
        "errors": io.errors,
        "wrong_blocks": io.wrong,
    }


def run(rounds: int, way: str, failures: list[str]) -> dict[str, Any]:
    """All rounds on one cluster, and at the end a comparison of the whole disk.

    A round that fails is the last one: it goes to ``failures``, and the figures are of those before it.
    """
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="kill-") as name,
        started_cluster("parent_kill", HOSTS, 2, failures) as cluster,
    ):
        image, host = cluster.folder / "image.raw", cluster.names[VM_HOST]
        write_image(image, rounds * IMAGE_BYTES_PER_ROUND)
        cluster.agents[0].publish(IMAGE, image)
        for agent in cluster.agents[1:]:
            agent.create(VM, IMAGE)
        disks = {host: {VM: cluster.agents[VM_HOST].vm(VM).disk.blockdev or {}}}
        blocks = random.sample(range(image.stat().st_size // BLOCK), image.stat().st_size // BLOCK)
        written: dict[int, bytes] = {}
        done: list[dict[str, Any]] = []
        wrong: list[int] | None = None
        with exported(Path(name), disks) as sockets:
            try:
                for number in range(rounds):
                    io = VerifiedIo(sockets[host], VM, image, written, blocks[number::rounds])
                    done.append(kill_round(cluster, host, number % len(ROLES), io, way))
                    say(f"round {number + 1} of {rounds}: {round_text(done[-1])}")
                say("comparing the whole disk")
                wrong = wrong_blocks(sockets[host], VM, image, written)
            except EXPECTED as error:
                failures.append(f"after {len(done)} rounds: {error}")
        if not done:
            raise Failed("; ".join(failures))
        return summary(done) | {"wrong_blocks_at_the_end": wrong, "rounds": done}


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All rounds together."""
    return {
        "stall_s": spread([each["stall_s"] for each in rounds]),
        "stall_s_by_role": {
            role: spread([each["stall_s"] for each in rounds if each["role"] == role])
            for role in sorted({each["role"] for each in rounds})
        },
        "return_stall_s": spread([each["return_stall_s"] for each in rounds]),
        "longest_before_s": spread([each["longest_before_s"] for each in rounds]),
        "requests": sum(each["requests"] for each in rounds),
        "compared_bytes": sum(each["compared_bytes"] for each in rounds),
        "errors": sum(len(each["errors"]) for each in rounds),
        "wrong_blocks": sum(len(each["wrong_blocks"]) for each in rounds),
    }


def round_text(done: dict[str, Any]) -> str:
    """One round for people."""
    return (
        f"killed {done['killed']} ({done['role']}), stall {done['stall_s']:.3f} s, at its return"
        f" {done['return_stall_s']:.3f} s, {done['requests']} requests, {len(done['errors'])} errors,"
        f" {len(done['wrong_blocks'])} wrong blocks"
    )


@click.command(context_settings=SETTINGS)
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="Kills, one after another.")
@click.option("--way", type=click.Choice(WAYS), default=WAYS[0], show_default=True, help="How a host goes.")
def main(rounds: int, way: str) -> None:
    """Kill the chunk store and the agent of inner hosts under verified I/O of a VM below them.

    Writes build/parent_kill.json and prints a table. Ends with exit code 1 after an I/O error or a wrong byte, or if a
    read waited for too long for a parent that hung.

    \b
    Examples:
      python -m benchmarks.parent_kill               # about 5 minutes
      python -m benchmarks.parent_kill --rounds 10 --way hang
    """
    with benchmark():
        failures: list[str] = []
        figures = run(rounds, way, failures)
        print_table(
            f"{len(figures['rounds'])} kills under {figures['requests']} requests: {figures['errors']} errors,"
            f" {figures['wrong_blocks']} wrong of {figures['compared_bytes'] // BLOCK} blocks compared,"
            f" wrong in the whole disk at the end: {figures['wrong_blocks_at_the_end']}",
            ["longest request, s", "min", "median", "p95", "max"],
            [
                [name, *(f"{values[which]:.3f}" for which in ("min", "median", "p95", "max"))]
                for name, values in {
                    "before the kill": figures["longest_before_s"],
                    "after the kill": figures["stall_s"],
                    **{f"after the kill of the {role}": each for role, each in figures["stall_s_by_role"].items()},
                    "at the return": figures["return_stall_s"],
                }.items()
            ],
        )
        if way == "hang" and figures["stall_s"]["max"] > HANG_BAR_S:
            failures.append(f"a read waited for longer than {HANG_BAR_S:g} s")
        if figures["errors"] or figures["wrong_blocks"] or figures["wrong_blocks_at_the_end"]:
            failures.append("the VM noticed: it got errors or wrong bytes")
        finish("parent_kill", figures, failures)


if __name__ == "__main__":
    main()
