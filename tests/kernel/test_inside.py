"""The tests of single drivers: they run in the guests, where the drivers find a real kernel.

Each file below ``inside`` runs in one guest, and the guests run side by side. Without WHOLE only the files that have
the contract of a driver run.
"""

from __future__ import annotations

import base64
import functools
import os
import queue
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.errors import CommandFailed
from lab.kernel.footprint import footprint
from lab.kernel.kernellog import troubles
from lab.kernel.machine import Machine
from lab.tools import BUILD, CHECKOUT
from tests.kernel.machines import ENVIRONMENT, FAILED_PATH, LOGS, changed_on_purpose, cluster
from tests.kernel.selection import selected

FILES = (
    "test_modules",
    "test_cached_devices",
    "test_bcache",
    "test_dmcache",
    "test_bcache_volumes",
    "test_dmthin",
    "test_iscsi",
    "test_ownership",
    "test_waiting",
    "test_dmsnapshot",
    "test_lio",
    "test_chunkstore",
    "test_devmapper",
    "test_loopdev",
    "test_command",
    "test_kernellog",
)
"""Those that take longest come first: a guest that is free takes the next one."""

CONTRACTS = {
    "test_bcache", "test_cached_devices", "test_dmcache", "test_dmsnapshot", "test_dmthin", "test_iscsi", "test_lio",
}  # fmt: skip
"""The files that have the contract of a driver."""

PROVOKED = {
    "test_iscsi": (*FAILED_PATH, "I/O error, dev dm-"),
    "test_bcache_volumes": ("Buffer I/O error on dev dm-",),
    "test_cached_devices": ("Buffer I/O error on dev dm-", "I/O error, dev dm-"),
    "test_waiting": ("Buffer I/O error on dev dm-", "I/O error, dev dm-", "I/O error, dev loop"),
}
"""How lines of the kernel's log begin that a file's tests provoke: they make a map fail, or reads that wait; or a
parent goes while the kernel looks for partitions on a new path to it, or fails what its children wait for."""

TIMEOUT = 3600.0
"""Seconds for a file; some took 1400 beside four programs that did nothing but count."""

STANDS = 900
"""Seconds after which a test that goes on says where its threads are; the longest took 160 beside all other tests."""


@dataclass(frozen=True)
class Result:
    """What a file's tests said if they failed, what they left in the guest, and what its kernel complained of."""

    failure: str
    left: dict[str, list[str]]
    complaints: list[str]


def run(machine: Machine, name: str) -> Result:
    """Run a file in a guest. The lines of drivers that ran, and the tests, are counted with those of this process."""
    machine.run(["dmesg", "--clear"])
    before, failure = footprint(machine), ""
    data, results = f"/run/coverage.{name}", f"/run/{name}.xml"
    measured = ["python3", "-W", "error", "-m", "coverage", "run", "--source=drivers", f"--data-file={data}"]
    # No plugins of others: to import them takes seconds. Nothing is missing in a guest, so that a skip is a failure.
    whole = f"WHOLE={os.environ.get('WHOLE', '')}"
    settings = ["PYTHONPATH=/opt/virtman", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", "CI=true", whole]
    options = ["-q", f"--junit-xml={results}", "-o", f"faulthandler_timeout={STANDS}", "-p", "no:cacheprovider"]
    command = [*measured, "-m", "pytest", *options, f"kernel/inside/{name}.py"]
    try:
        said = machine.run(["env", "-C", "/opt/virtman/tests", *settings, *command], timeout=TIMEOUT)
        fetch(machine, data, CHECKOUT / f".coverage.{ENVIRONMENT}.{name}")
    except subprocess.TimeoutExpired as error:
        said = failure = f"it did not end: {error.output!r}"
        machine.cut_power()
        machine.start()
        machine.wait_up()
    except CommandFailed as error:
        said = failure = error.output
    else:
        fetch(machine, results, BUILD / f"results/{ENVIRONMENT}.{name}.xml")
    (LOGS / f"{name}.log").write_text(said)
    after = footprint(machine)
    left = {kind: found for kind, found in after.items() if found != before[kind]}
    kernel_log = machine.kernel_log()
    (LOGS / f"{name}.dmesg").write_text(kernel_log)
    complaints = troubles(kernel_log)
    if name in PROVOKED:
        complaints = [line for line in complaints if not line.startswith(PROVOKED[name])]
    return Result(failure, left, complaints)


def fetch(machine: Machine, path: str, to: Path) -> None:
    """Copy a file from a guest."""
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(base64.b64decode(machine.run(["base64", path])))


@functools.cache
def runs() -> dict[str, Future[Result]]:
    """The runs of all selected files, which have begun."""
    machines = cluster().machines.values()
    changed_on_purpose()
    free: queue.SimpleQueue[Machine] = queue.SimpleQueue()
    for machine in machines:
        free.put(machine)

    def run_in_free(name: str) -> Result:
        machine = free.get()
        try:
            return run(machine, name)
        finally:
            free.put(machine)

    pool = ThreadPoolExecutor(len(machines))
    return {name: pool.submit(run_in_free, name) for name in FILES if f"test_inside[{name}]" in selected}


def test_every_file_is_run() -> None:
    assert {path.stem for path in (Path(__file__).parent / "inside").glob("test_*.py")} == set(FILES)


@pytest.mark.parametrize(
    "name", [name if name in CONTRACTS else pytest.param(name, marks=pytest.mark.long) for name in FILES]
)
def test_inside(name: str) -> None:
    """The tests of a file pass, leave nothing in the guest, and its kernel does not complain."""
    assert runs()[name].result() == Result("", {}, [])
