"""CPU time and memory of the processes of a wave, by what they are."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.figures import percentile
from benchmarks.processes import cpu_seconds, memory
from lab.process import processes_of

STORES, AGENTS, VOLT, VM_DISKS = "chunk stores", "agents", "volt", "VMs' disks"
"""VM_DISKS: the storage daemons that stand for the VMs' own QEMUs."""


def kind_of(command_line: str) -> str | None:
    """What a process of a cluster is, by its command line."""
    words = command_line.split()
    if Path(words[0]).name == "virtman-chunkd":
        return STORES
    if "agent" in words:
        return AGENTS
    return VOLT if "serve" in words else None


def processes(cluster: Iterable[Path], vm_disks: Path) -> dict[str, list[int]]:
    """Process ids by kind: of a cluster that keeps its things below the first folders, and of the VMs' disks."""
    found: dict[str, set[int]] = defaultdict(set)
    for folder in cluster:
        for pid, line in processes_of(folder).items():
            kind = kind_of(line)
            if kind is not None:
                found[kind].add(pid)
    found[VM_DISKS] = set(processes_of(vm_disks))
    # The VMs' disks name the cluster's files on their command lines, too.
    return {kind: sorted(pids - found[VM_DISKS] if kind != VM_DISKS else pids) for kind, pids in found.items()}


def cpu(pids: Mapping[str, list[int]]) -> dict[str, float]:
    """CPU seconds used so far, by kind."""
    return {kind: sum(cpu_seconds(pid) for pid in of_kind) for kind, of_kind in pids.items()}


def cpu_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """CPU seconds used from one moment to another, by kind and in all."""
    used = {kind: round(after[kind] - before.get(kind, 0.0), 2) for kind in after}
    return used | {"all": round(sum(used.values()), 2)}


def memory_per_process(pids: Mapping[str, list[int]]) -> dict[str, dict[str, int]]:
    """Median RSS and PSS of one process in bytes, by kind."""
    figures = {}
    for kind, of_kind in pids.items():
        each = [memory(pid) for pid in of_kind]
        if each:
            figures[kind] = {name: int(percentile([one[name] for one in each], 50)) for name in ("rss", "pss")}
    return figures


def own_cpu() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
