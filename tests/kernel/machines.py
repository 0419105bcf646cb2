"""One kernel lab for all tests of this folder: booting it takes longer than most of them."""

from __future__ import annotations

import atexit
import functools
import shutil
from pathlib import Path

from testtools import TestCase

from lab.kernel.cluster import KernelCluster
from lab.kernel.footprint import footprint
from lab.kernel.kernellog import troubles
from lab.kernel.machine import Machine
from lab.tools import BUILD

HOSTS = 2
LOGS = BUILD / "kernel-tests"


@functools.cache
def cluster() -> KernelCluster:
    """The lab, with its logs in LOGS; it ends with the test run."""
    shutil.rmtree(LOGS, ignore_errors=True)
    started = KernelCluster(LOGS, HOSTS, shared=[Path(__file__).parents[1]])
    atexit.register(started.stop)
    started.start()
    return started


class KernelCase(TestCase):
    """A test with ``machines``. Afterwards each of them is as it was, and no kernel has complained."""

    def setUp(self) -> None:
        """Remember what is there."""
        super().setUp()
        self.machines = cluster().machines
        self.addCleanup(self._check_kernels)
        for machine in self.machines.values():
            machine.run(["dmesg", "--clear"])
            self.addCleanup(self._check_footprint, machine, footprint(machine))

    @property
    def origin(self) -> Machine:
        return self.machines["origin"]

    @property
    def host(self) -> Machine:
        return self.machines["host-1"]

    def _check_footprint(self, machine: Machine, before: dict[str, list[str]]) -> None:
        self.assertEqual(before, footprint(machine))

    def _check_kernels(self) -> None:
        self.assertEqual({}, {name: found for name, m in self.machines.items() if (found := troubles(m.kernel_log()))})
