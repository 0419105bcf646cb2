"""What drivers need of the machine."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from unittest import mock

from testtools import TestCase

from drivers.errors import DriverError
from drivers.needs import Finding, Library, Machine, Needs, Node, Tool, check, provide
from tests.doubles.machine import MachineDouble

ALL = Needs(
    tools=(Tool("saw", "saws"),),
    modules=("wood",),
    libraries=(Library("plank", "python3-plank", "plank-py"),),
    nodes=(Node(Path("/dev/wood"), "timber"),),
    root=True,
    address=True,
)
NAMES = ["root", "saw", "Python library plank", "module wood", "/dev/wood", "address"]


class CheckTest(TestCase):
    def missing(self, *without: str, debian_python: bool = True, address: str = "10.0.0.1") -> list[Finding]:
        found = check(ALL, MachineDouble(without=without, debian_python=debian_python), address)
        self.assertEqual(NAMES, [finding.need for finding in found])
        return [finding for finding in found if not finding.met]

    def test_a_machine_that_has_all_or_brings_a_path_by_a_module(self) -> None:
        self.assertEqual([], self.missing())
        self.assertEqual([], self.missing("/dev/wood"))

    def test_what_is_missing_names_its_package_or_a_remedy(self) -> None:
        self.assertEqual([Finding("saw", met=False, package="saws")], self.missing("saw"))
        self.assertEqual(["python3-plank"], [finding.package for finding in self.missing("plank")])
        # A Python that does not see Debian's libraries.
        (finding,) = self.missing("plank", debian_python=False)
        self.assertEqual((None, f"{sys.executable} -m pip install plank-py"), (finding.package, finding.remedy))
        for without in (["root"], ["wood"], ["/dev/wood", "timber"]):
            (finding,) = self.missing(*without)
            self.assertIsNone(finding.package)
            self.assertTrue(finding.remedy)
        (finding,) = self.missing(address="")
        self.assertIn("--address", finding.remedy or "")


class MachineTest(TestCase):
    def test_tools(self) -> None:
        self.assertTrue(Machine().has_tool("ls"))
        self.assertFalse(Machine().has_tool("virtman-has-no-such-tool"))

    def test_tools_for_administrators_are_found_whatever_the_path(self) -> None:
        tool = next(path.name for path in sorted(Path("/usr/sbin").iterdir()) if os.access(path, os.X_OK))
        self.enterContext(mock.patch.dict(os.environ, PATH="/nonexistent"))
        self.assertTrue(Machine().has_tool(tool))

    def test_a_module_that_is_there_and_does_not_bring_its_path_is_named(self) -> None:
        loaded = next(Path("/sys/module").iterdir(), None)
        if loaded is None:
            self.skipTest("this kernel shows no module in /sys/module")
        self.assertTrue(Machine().has_module(loaded.name))
        needs = Needs(nodes=(Node(Path("/proc/virtman"), loaded.name),))
        self.assertIn("/proc/virtman", str(self.assertRaises(DriverError, provide, needs)))

    def test_a_folder_that_is_there_need_not_be_mounted(self) -> None:
        self.assertTrue(Machine().has_node(Node(Path("/proc"), "", mount="procfs")))
        self.assertFalse(Machine().has_node(Node(Path("/proc/self"), "", mount="procfs")))


class OwnDriversTest(TestCase):
    def test_every_driver_of_ours_says_what_it_needs(self) -> None:
        for layer in ("source", "attach", "cache", "export", "snapshot"):
            for point in entry_points(group=f"virtman.drivers.{layer}"):
                if point.value.startswith("drivers."):
                    self.assertIsInstance(point.load().needs, Needs, point.value)
