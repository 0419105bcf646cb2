"""The kernel lab as the benchmarks use it: guests with Volt and agents, programs in them, and what agents said."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.errors import Failed, TookTooLong
from benchmarks.inside.content import BLOCK
from benchmarks.processes import say
from lab.errors import Leftovers
from lab.kernel.cluster import KernelCluster
from lab.kernel.machine import Machine
from lab.kernel.services import Services, agent
from lab.process import attempts
from lab.tools import BUILD, CHECKOUT

_FILE = "/root/image.raw"
_MAKING_LIMIT = 300.0


@dataclass(frozen=True)
class KernelLab:
    """``machines`` by name: origin, host-1, host-2, …; ``services`` are what runs on them."""

    machines: Mapping[str, Machine]
    services: Services

    @property
    def hosts(self) -> list[Machine]:
        """All guests but the origin."""
        return [machine for name, machine in self.machines.items() if name != "origin"]

    def publish(self, image: str, size: int) -> None:
        """Publish an image of ``benchmarks.inside.content``. Raises CommandFailed."""
        origin = self.machines["origin"]
        origin.run(program("content", _FILE, str(size // BLOCK)), timeout=_MAKING_LIMIT)
        origin.run(["virtman", "publish", image, _FILE])
        origin.run(["rm", _FILE])


@contextlib.contextmanager
def kernel_lab(
    name: str, hosts: int, volt_settings: Sequence[str], leftovers: list[str], *, suite: str = ""
) -> Iterator[KernelLab]:
    """An origin and ``hosts`` hosts, of a Debian release. Their logs stay in build/<name>."""
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    say(f"booting {hosts + 1} guests; their logs are in {folder}")
    cluster = KernelCluster(folder, hosts, suite=suite, shared=[CHECKOUT / "benchmarks"])
    try:
        with cluster:
            services = Services(cluster.machines, volt_settings=volt_settings)
            say("starting Volt and the agents")
            services.start()
            yield KernelLab(cluster.machines, services)
            say("stopping the guests")
    except Leftovers as error:
        leftovers.append(str(error))


def program(name: str, *words: str) -> list[str]:
    """The command of a program of ``benchmarks.inside`` in a guest."""
    return ["env", "PYTHONPATH=/opt/virtman", "python3", "-W", "ignore", "-m", f"benchmarks.inside.{name}", *words]


def begin(machine: Machine, name: str, *words: str) -> subprocess.Popen[str]:
    """Begin a program; its first line of output has come. Raises Failed."""
    process = machine.begin(program(name, *words))
    assert process.stdout is not None
    if not process.stdout.readline():
        raise Failed(f"{name} on {machine.name} ended with exit code {process.wait()}")
    return process


def result(process: subprocess.Popen[str], timeout: float) -> Any:
    """The JSON on the last line of what a program said. Raises Failed, TookTooLong."""
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.wait()
        raise TookTooLong(f"a program in a guest did not end within {timeout:.0f} s") from error
    if process.returncode != 0:
        raise Failed(f"a program in a guest ended with exit code {process.returncode}: {said[-500:]}")
    return json.loads(said.splitlines()[-1])


def paths(machine: Machine, image: str) -> dict[str, str]:
    """The state of each parent of a guest, in order. Raises CommandFailed."""
    [status] = [each for each in agent(machine).status().images if each.name == image]
    return {path.host: path.state for path in status.paths}


def usable_parents(machine: Machine, image: str, at_least: int, limit: float) -> list[str]:
    """Whom a guest can read from, first whom it reads from now, once there are so many. Raises TookTooLong."""
    found: dict[str, str] = {}
    for _ in attempts(limit):
        found = paths(machine, image)
        usable = sorted((host for host in found if found[host] != "lost"), key=lambda host: found[host] != "active")
        if len(usable) >= at_least:
            return usable
    raise TookTooLong(f"{machine.name} has not {at_least} usable parents after {limit:.0f} s: {found}")


def agent_log(machine: Machine, since: float) -> list[tuple[float, str]]:
    """What the guest's agent said, each with the guest's time since the epoch. Raises CommandFailed."""
    journal = ["journalctl", "--unit", "virtman-agent.service", "--output", "json", "--since", f"@{since:.0f}"]
    entries = [json.loads(line) for line in machine.run(journal).splitlines()]
    return [(int(entry["__REALTIME_TIMESTAMP"]) / 1e6, str(entry["MESSAGE"])) for entry in entries]
