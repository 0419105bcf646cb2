"""Where the time of one clone goes when nothing else is done: the clone, and the programs that it starts, alone."""

from __future__ import annotations

import json
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import percentile
from benchmarks.processes import cpu_seconds
from lab.cluster import Cluster, tool
from lab.opennebula import Answer, Frontend, Vm
from lab.process import processes_of

HOST = "host-1"
"""It has the image already."""


class Parts:
    """Seconds and CPU seconds of each part, by its name. CPU time is that of ended child processes."""

    def __init__(self) -> None:
        self._samples: dict[str, list[tuple[float, float]]] = {}

    def time(self, name: str, act: Callable[[], object]) -> None:
        """Do something, and note what it took."""
        began, cpu = time.monotonic(), _children_cpu()
        act()
        self._samples.setdefault(name, []).append((time.monotonic() - began, _children_cpu() - cpu))

    def figures(self) -> dict[str, dict[str, float]]:
        """Medians, by part."""
        return {
            name: {"s": percentile([one[0] for one in each], 50), "cpu_s": percentile([one[1] for one in each], 50)}
            for name, each in self._samples.items()
        }


def clone_cost(
    cluster: Cluster, frontend: Frontend, image: str, vms: Sequence[Vm], deploy: Callable[[Vm], Answer]
) -> dict[str, Any]:
    """Clones of VMs one after another, and the parts of a clone as often. The agent's CPU time is of one clone."""
    parts = Parts()
    pids = list(processes_of(cluster.run_folder(cluster.names.index(HOST))))
    before, calls = sum(map(cpu_seconds, pids)), len(frontend.exchange.calls)
    for vm in vms:
        parts.time("clone", lambda vm=vm: deploy(vm).check())  # type: ignore[misc]
    agent_cpu = (sum(map(cpu_seconds, pids)) - before) / len(vms)
    made = frontend.exchange.calls[calls:]
    for number, vm in enumerate(vms):
        for name, act in _programs(cluster, frontend, image, vm, f"cost-{number}"):
            parts.time(name, act)
    seconds = {
        f"of it, {program}": percentile([call.seconds for call in made if call.program == program], 50)
        for program in sorted({call.program for call in made})
    }
    return {"parts": parts.figures(), "called_s": seconds, "agents_cpu_s": agent_cpu, "rounds": len(vms)}


def _programs(
    cluster: Cluster, frontend: Frontend, image: str, vm: Vm, name: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What a clone starts, one thing at a time, and what each of these costs without doing anything."""
    here, there = frontend.on(frontend.name), frontend.on(HOST)
    environment = frontend.environment()
    run_py = frontend.remotes / "tm" / "virtman" / "run.py"
    host = json.loads((frontend.folder / "hosts.json").read_text())[HOST]["environment"]
    number = cluster.names.index(HOST)
    virtman: list[str | Path] = [*there, tool("virtman")]

    def starter(argv: Sequence[str | Path], env: Mapping[str, str] = environment) -> Callable[[], object]:
        return lambda: subprocess.run(argv, env=dict(env), capture_output=True, check=False, cwd="/")

    yield "stand: enter a host", starter([*there, "true"])
    yield "stand: ssh HOST true", starter([*here, "ssh", HOST, "true"])
    yield "stand: onevm show", starter([*here, "onevm", "show", "-x", str(vm.number)])
    yield "front end: bare python3", starter([*here, "python3", "-ISB", "-c", ""])
    yield "front end: script that refuses", starter([*here, "python3", "-IB", run_py, "tm", "nosuch"])
    yield "host: virtman --version", starter([*virtman, "--version"], host)
    yield "host: virtman list", starter([*virtman, "list"], host)
    yield "host: virtman create", starter([*virtman, "create", name, image], host)
    yield "host: virtman destroy", starter([*virtman, "destroy", name], host)
    yield "agent: create", lambda: cluster.agents[number].create(name, image)
    yield "agent: list", cluster.agents[number].vms
    yield "agent: destroy", lambda: cluster.agents[number].destroy(name)


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
