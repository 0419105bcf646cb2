"""What drivers need of the kernel, on a host where nothing of it is loaded."""

from __future__ import annotations

from pathlib import Path

from testtools import TestCase

from drivers.attach.iscsi import IscsiAttach
from drivers.cache.bcache import BcacheCache
from drivers.cache.dmcache import DmCache
from drivers.errors import CommandFailed
from drivers.export.lio import LioExport
from drivers.host.command import run
from drivers.needs import Machine, Needs, check, provide
from drivers.snapshot.dmsnapshot import DmSnapshotDisks
from drivers.snapshot.dmthin import DmThinDisks

DRIVERS = (IscsiAttach, BcacheCache, DmCache, LioExport, DmSnapshotDisks, DmThinDisks)
UNUSED = frozenset({"bcache", "dm_cache", "dm_cache_smq", "dm_snapshot", "dm_thin_pool", "dm_queue_length"})
"""Modules that nothing but a stack of ours uses: they can go while there is none."""


def loaded(needs: Needs) -> set[str]:
    return {module for module in needs.modules if Path("/sys/module", module).exists()}


def unload(modules: tuple[str, ...]) -> None:
    for module in reversed(modules):
        try:
            run(["modprobe", "--remove", module])
        except CommandFailed as error:
            if module in UNUSED:
                raise AssertionError(f"{module} cannot be unloaded") from error


class FreshHostTest(TestCase):
    def test_each_driver_has_its_modules_loaded_and_its_file_systems_mounted(self) -> None:
        for driver in DRIVERS:
            unload(driver.needs.modules)
            self.assertEqual(set(), loaded(driver.needs) & UNUSED)
            if Path("/sys/kernel/config").is_mount():
                run(["umount", "/sys/kernel/config"])
            self.assertEqual([], [found for found in check(driver.needs, Machine(), "10.0.0.1") if not found.met])
            provide(driver.needs)
            provide(driver.needs)
            self.assertEqual(set(driver.needs.modules), loaded(driver.needs))
            self.assertEqual([], [node for node in driver.needs.nodes if not Machine().has_node(node)])
        provide(LioExport.needs)  # as it was
