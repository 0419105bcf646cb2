"""One kernel lab for all tests of this folder: booting it takes longer than most of them."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from testtools import TestCase

from lab.errors import LabError
from lab.kernel.cluster import KernelCluster
from lab.kernel.footprint import footprint
from lab.kernel.kernellog import troubles
from lab.kernel.machine import Machine
from lab.tools import BUILD, CHECKOUT

T = TypeVar("T")

HOSTS = 2
FAILED_PATH = ("I/O error, dev sd", "Buffer I/O error on dev sd")
"""A path whose parent goes fails requests, which the map sends by another one (Linux: block/blk-mq.c,
blk_print_req_error), and the kernel's own look for partitions on a new one (fs/buffer.c, end_buffer_async_read). A
map's own errors name dm-."""
SUITE = os.environ.get("SUITE", "")
"""The codename of the guests' Debian release; this machine's unless given."""
ENVIRONMENT = os.environ.get("TOX_ENV_NAME", "kernel")
"""The name of tox's environment, in which these tests run. Several may run side by side."""
LOGS = BUILD / "kernel-tests" / ENVIRONMENT

Footprints = dict[str, dict[str, list[str]]]

_left: Footprints = {}
"""What the last test found on each guest at its end; the next test begins with it, unless it was changed on purpose."""


def cluster() -> KernelCluster:
    """The lab, with its logs in LOGS; it ends with the test run. Raises LabError: once it did not start, each time."""
    started = _started()
    if isinstance(started, LabError):
        raise started
    return started


@functools.cache
def _started() -> KernelCluster | LabError:
    shutil.rmtree(LOGS, ignore_errors=True)
    lab = KernelCluster(LOGS, HOSTS, suite=SUITE, shared=[CHECKOUT / "tests", CHECKOUT / "opennebula_tm"])
    atexit.register(lab.stop)
    try:
        lab.start()
    except LabError as error:
        return error  # each test that tried again would leave more guests that run, until the end
    return lab


def changed_on_purpose() -> None:
    """Say that what was done to the guests between two tests is to stay."""
    _left.clear()


class KernelCase(TestCase):
    """A test with ``machines``. Afterwards each of them is as it was, and no kernel has complained."""

    forgiven: tuple[str, ...] = ()
    """How lines of a kernel's log begin that are no complaints in this test."""

    def setUp(self) -> None:
        """Remember what is there."""
        super().setUp()
        self.machines = cluster().machines
        self.addCleanup(self._check_kernels)
        self.addCleanup(self._check_footprints, dict(_left) or self._footprints())
        self._on_all(lambda machine: machine.run(["dmesg", "--clear"]))

    @property
    def origin(self) -> Machine:
        return self.machines["origin"]

    @property
    def host(self) -> Machine:
        return self.machines["host-1"]

    def _check_footprints(self, before: Footprints) -> None:
        after = self._footprints()
        _left.clear()
        _left.update(after)
        self.assertEqual(before, after)

    def _footprints(self) -> Footprints:
        return self._on_all(footprint)

    def _on_all(self, act: Callable[[Machine], T]) -> dict[str, T]:
        """Act on all machines at the same time."""
        with ThreadPoolExecutor(len(self.machines)) as pool:
            return dict(zip(self.machines, pool.map(act, self.machines.values()), strict=True))

    def _check_kernels(self) -> None:
        found = self._on_all(lambda machine: troubles(machine.kernel_log()))
        left = {name: [line for line in lines if not line.startswith(self.forgiven)] for name, lines in found.items()}
        try:
            for name in [name for name, lines in left.items() if lines]:
                journal = self.machines[name].run(["journalctl", "--boot", "--output=short-monotonic", "--no-pager"])
                (LOGS / f"{name}.{self.id().rpartition('.')[2]}.journal").write_text(journal)
        finally:
            self.assertEqual({name: [] for name in left}, left)
