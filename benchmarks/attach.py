"""How long hosts take to attach an image: one alone, all that start together, and the processes that this starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.figures import percentile, spread
from benchmarks.misses import Place
from benchmarks.processes import tool
from lab.tools import run
from virtman.client import AgentClient

_EMPTY_BYTES = 1 << 30


def timed(act: Callable[..., Any], *arguments: Any) -> float:
    """Seconds that a call takes."""
    started = time.monotonic()
    act(*arguments)
    return time.monotonic() - started


def together(hosts: Sequence[str], act: Callable[[str], Any]) -> tuple[dict[str, float], float]:
    """Do it for all hosts at once: seconds of each, and of all. The first error is raised when all have ended."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        started = time.monotonic()
        seconds = dict(zip(hosts, pool.map(lambda host: timed(act, host), hosts), strict=True))
        return seconds, time.monotonic() - started


def alone(agents: Sequence[AgentClient], image: str) -> list[float]:
    """Seconds in which each host attaches and makes one VM's disk, while no other host has the image."""
    seconds = []
    for agent in agents:
        seconds.append(timed(agent.create, "alone", image))
        agent.destroy("alone")
        agent.gc()
    return seconds


def bare_processes(folder: Path, hosts: Sequence[str]) -> float:
    """Seconds of what no attach can do without, for all hosts at once: qemu-img makes a VM's disk."""
    create = [tool("qemu-img"), "create", "-q", "-f", "qcow2"]
    return together(hosts, lambda host: run([*create, str(folder / f"{host}.disk"), str(_EMPTY_BYTES)]))[1]


def figures(
    alone_s: Sequence[float], each_s: Mapping[str, float], all_s: float, bare_s: float, places: Mapping[str, Place]
) -> dict[str, Any]:
    """Attach times for the report; ``by_depth_s`` holds medians.

    Who asks first gets a shallow place and is first in the queue for the CPUs, too: what depth itself costs shows the
    comparison with a star, where all have depth 1.
    """
    depths = sorted({places[host].depth for host in each_s})
    return {
        "alone_s": spread(alone_s),
        "each_s": spread(list(each_s.values())),
        "all_s": all_s,
        "bare_processes_s": bare_s,
        "by_depth_s": {
            depth: percentile([seconds for host, seconds in each_s.items() if places[host].depth == depth], 50)
            for depth in depths
        },
    }
