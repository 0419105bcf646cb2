"""Which node of a running QEMU is over a file or a device."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from testtools import TestCase

from drivers.errors import MonitorFailed
from drivers.qemu.nodes import Nodes

DISK = Path("/dev/mapper/virtman-vm-a")


class QemuDouble:
    """Has these nodes: name, driver, file, and the names of those that have it as their file.

    They are listed as QEMU 7.2 does: those that were made last come first.
    """

    def __init__(self, *nodes: tuple[str, str, str, str]) -> None:
        self.nodes = nodes
        self.asked = 0

    def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        if command == "query-named-block-nodes":
            assert arguments == {"flat": True}
            self.asked += 1
            cache = {"cache": {"direct": False, "no-flush": False}, "detect_zeroes": "off"}
            return [{"node-name": name, "drv": driver, "file": file, **cache} for name, driver, file, _ in self.nodes]
        assert command == "x-debug-query-block-graph"
        names = ["", *(name for name, *_ in self.nodes)]
        return {
            "nodes": [{"id": number, "name": name} for number, name in enumerate(names)],
            "edges": [
                {"parent": names.index(parent), "name": "file" if parent else "root", "child": names.index(name)}
                for name, _, _, parent in self.nodes
            ],
        }


class NodesTest(TestCase):
    other = ("other", "raw", "/dev/mapper/virtman-vm-ab", "")

    def test_the_format_over_a_device_is_found_wherever_it_is_listed(self) -> None:
        nodes = [self.other, ("format", "raw", str(DISK), ""), ("storage", "host_device", str(DISK), "format")]
        for listed in (nodes, nodes[::-1]):
            self.assertEqual("format", Nodes(QemuDouble(*listed)).demand(DISK))

    def test_the_format_over_a_file_is_found_whatever_it_is_called_there(self) -> None:
        qemu = QemuDouble(("format", "qcow2", "json:{}", ""), ("storage", "file", "/disk", "format"))
        self.assertEqual("format", Nodes(qemu).demand(Path("/disk")))

    def test_without_a_format_it_is_the_devices_own(self) -> None:
        self.assertEqual("storage", Nodes(QemuDouble(("storage", "host_device", str(DISK), ""), self.other)).of(DISK))

    def test_a_vm_without_the_disk_is_told_of(self) -> None:
        nodes = Nodes(QemuDouble(self.other))
        self.assertIsNone(nodes.of(DISK))
        self.assertRaises(MonitorFailed, nodes.demand, DISK)

    def test_a_node_that_was_made_meanwhile_is_known_without_asking_for_all_files(self) -> None:
        qemu = QemuDouble(self.other)
        nodes = Nodes(qemu)
        qemu.nodes += (("new", "qcow2", "json:{}", ""), ("new-file", "file", "/new", "new"))
        nodes.add("new", Path("/new"))
        self.assertEqual("new", nodes.of(Path("/new")))
        self.assertEqual(1, qemu.asked)
        self.assertEqual(("qcow2", "new-file"), itemgetter("driver", "file")(nodes.as_it_is("new")))
