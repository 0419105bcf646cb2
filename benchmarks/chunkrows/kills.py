"""kill -9 of a host's chunk store, again and again, under verified I/O of eight VMs there."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.chunkrows.images import random_file
from benchmarks.chunkrows.scale import Job
from benchmarks.chunkrows.table import Line
from benchmarks.disks import exported
from benchmarks.errors import Failed
from benchmarks.figures import MIB
from benchmarks.hosts import chunk_store, settled_places, started_cluster
from benchmarks.processes import say
from benchmarks.verifiedio import BLOCK, VerifiedIo, wrong_blocks
from lab.process import attempts

IMAGE = "killed"
VMS = 8
STALL_BAR_S = 1.2
LEAD_S, REST_S = 0.5, 2.0
"""Seconds of I/O before each kill, and after it."""
BLOCKS_A_ROUND = 4 * MIB // BLOCK
"""Of each VM, which has not visited them before."""
SPREAD = 4
"""How many times as large the image is: else soon all of it would be in the host's pool."""
_RESTART_LIMIT = 30.0


@dataclass
class Found:
    """``stalls``: seconds of the longest request that a kill met, for each round."""

    stalls: list[float] = field(default_factory=list)
    requests: int = 0
    errors: list[str] = field(default_factory=list)
    wrong: int = 0


def measure(job: Job) -> list[Line]:
    """Two lines. Raises BenchmarkError, LabError."""
    leftovers: list[str] = []
    found = _killed(job.scale.kills, leftovers)
    if leftovers:
        raise Failed("; ".join(leftovers))
    what = f"kill -9 of the chunk store under {VMS} VMs, {len(found.stalls)} rounds"
    noticed = f"{len(found.errors)} errors, {found.wrong} wrong blocks in {found.requests:,} requests"
    stall = max(found.stalls)
    return [
        Line(f"{what}: what VMs notice", "no error, no wrong byte", noticed, not found.errors and not found.wrong),
        Line(f"{what}: longest request", f"below {STALL_BAR_S:g} s", f"{stall:.3f} s", stall < STALL_BAR_S),
    ]


def _killed(rounds: int, leftovers: list[str]) -> Found:
    vms = [f"vm-{number}" for number in range(VMS)]
    with (
        TemporaryDirectory(dir="/tmp", prefix="kills-") as folder,
        started_cluster("chunkstore-kills", 1, 1, leftovers) as cluster,
        ExitStack() as stack,
    ):
        size = SPREAD * rounds * BLOCKS_A_ROUND * BLOCK
        image, host = random_file(cluster.folder / "image.raw", size), cluster.names[1]
        cluster.agents[0].publish(IMAGE, image)
        disks = {vm: {vm: cluster.agents[1].create(vm, IMAGE).disk.blockdev or {}} for vm in vms}
        settled_places(cluster, IMAGE)
        sockets = dict(stack.enter_context(exported(Path(folder), disks)))
        written: dict[str, dict[int, bytes]] = {vm: {} for vm in vms}
        blocks = {vm: random.Random(vm).sample(range(size // BLOCK), size // BLOCK) for vm in vms}
        found = Found()
        for number in range(rounds):
            share = {vm: of_vm[number * BLOCKS_A_ROUND :][:BLOCKS_A_ROUND] for vm, of_vm in blocks.items()}
            running = [VerifiedIo(sockets[vm], vm, image, written[vm], share[vm]) for vm in vms]
            _round(lambda: chunk_store(cluster, host), running, found)
            say(f"round {number + 1} of {rounds}: longest request {found.stalls[-1]:.3f} s")
        say("comparing the whole disks")
        found.wrong += sum(len(wrong_blocks(sockets[vm], vm, image, written[vm])) for vm in vms)
        return found


def _round(store: Callable[[], int], vms: Sequence[VerifiedIo], found: Found) -> None:
    """Kill the store once, under I/O of all VMs, and wait until there is another one."""
    old = store()
    with ExitStack() as stack:
        for vm in vms:
            stack.enter_context(vm)
        time.sleep(LEAD_S)
        killed = time.monotonic()
        os.kill(old, signal.SIGKILL)
        _wait_for_another(store, old)
        time.sleep(REST_S)
    requests = [request for vm in vms for request in vm.requests]
    found.requests += len(requests)
    found.stalls.append(max((each.ended - each.began for each in requests if each.ended >= killed), default=0.0))
    found.errors += [error for vm in vms for error in vm.errors]
    found.wrong += sum(len(vm.wrong) for vm in vms)


def _wait_for_another(store: Callable[[], int], old: int) -> None:
    for _ in attempts(_RESTART_LIMIT):
        with suppress(ValueError):  # there is none, or the dead one is still listed
            if store() != old:
                return
    raise Failed(f"nobody started the chunk store again within {_RESTART_LIMIT:g} s")
