"""The tests of single drivers: they run in the guests, where the drivers find a real kernel.

Each file below ``inside`` runs in one guest, one after the other there, and the guests run side by side.
"""

from __future__ import annotations

import base64
import functools
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from testtools import TestCase

from lab.errors import CommandFailed
from lab.kernel.footprint import footprint
from lab.kernel.kernellog import troubles
from lab.kernel.machine import Machine
from lab.tools import CHECKOUT
from tests.kernel.machines import LOGS, cluster
from tests.kernel.selection import selected

GUESTS = {
    "test_dmthin": "origin",
    "test_dmsnapshot": "origin",
    "test_lio": "origin",
    "test_bcache": "host-1",
    "test_bcache_volumes": "host-1",
    "test_dmcache": "host-2",
    "test_iscsi": "host-2",
    "test_devmapper": "host-2",
    "test_loopdev": "host-2",
}
"""Where each file runs: every guest has about as long to do."""

PROVOKED = {"test_bcache_volumes": "Buffer I/O error on dev dm-"}
"""How lines of the kernel's log begin that a file's tests provoke: there, a volume's map is made to fail."""

TIMEOUT = 900.0


@dataclass(frozen=True)
class Result:
    """What a file's tests said if they failed, what they left in the guest, and what its kernel complained of."""

    failure: str
    left: dict[str, list[str]]
    complaints: list[str]


def run(machine: Machine, name: str) -> Result:
    """Run a file in a guest. The lines of drivers that ran are counted with those of the other tests."""
    machine.run(["dmesg", "--clear"])
    before, failure = footprint(machine), ""
    data = f"/run/coverage.{name}"
    measured = ["python3", "-W", "error", "-m", "coverage", "run", "--source=drivers", f"--data-file={data}"]
    command = [*measured, "-m", "pytest", "-q", "--durations=10", "-p", "no:cacheprovider", f"kernel/inside/{name}.py"]
    try:
        said = machine.run(["env", "-C", "/opt/virtman/tests", "PYTHONPATH=/opt/virtman", *command], timeout=TIMEOUT)
        (CHECKOUT / f".coverage.kernel.{name}").write_bytes(base64.b64decode(machine.run(["base64", data])))
    except CommandFailed as error:
        said = failure = error.output
    (LOGS / f"{name}.log").write_text(said)
    after = footprint(machine)
    left = {kind: found for kind, found in after.items() if found != before[kind]}
    complaints = troubles(machine.kernel_log())
    if name in PROVOKED:
        complaints = [line for line in complaints if not line.startswith(PROVOKED[name])]
    return Result(failure, left, complaints)


@functools.cache
def runs() -> dict[str, Future[Result]]:
    """The runs of all selected files, which have begun."""
    machines = cluster().machines
    queues = {name: ThreadPoolExecutor(1, thread_name_prefix=name) for name in machines}
    return {name: queues[GUESTS[name]].submit(run, machines[GUESTS[name]], name) for name in GUESTS if name in selected}


class InsideTest(TestCase):
    """One test for each file."""

    def check(self, name: str) -> None:
        self.assertEqual(Result("", {}, []), runs()[name].result())

    def test_dmthin(self) -> None:
        self.check("test_dmthin")

    def test_dmsnapshot(self) -> None:
        self.check("test_dmsnapshot")

    def test_lio(self) -> None:
        self.check("test_lio")

    def test_iscsi(self) -> None:
        self.check("test_iscsi")

    def test_bcache(self) -> None:
        self.check("test_bcache")

    def test_bcache_volumes(self) -> None:
        self.check("test_bcache_volumes")

    def test_dmcache(self) -> None:
        self.check("test_dmcache")

    def test_devmapper(self) -> None:
        self.check("test_devmapper")

    def test_loopdev(self) -> None:
        self.check("test_loopdev")

    def test_every_file_has_a_test(self) -> None:
        files = {path.stem for path in (Path(__file__).parent / "inside").glob("test_*.py")}
        self.assertEqual((files, files), (set(GUESTS), {name for name in dir(self) if name in files}))
