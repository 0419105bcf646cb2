"""What a QEMU that runs is told of a disk that has grown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testtools import TestCase

from drivers.errors import MonitorFailed
from drivers.snapshot.dmthin import tell_size

DISK = Path("/dev/mapper/virtman-vm-a")


class QemuDouble:
    """Has these nodes: name, driver, file. They are listed as QEMU 7.2 does: those that were made last come first."""

    def __init__(self, *nodes: tuple[str, str, str]) -> None:
        self.nodes = [{"node-name": name, "drv": driver, "file": file} for name, driver, file in nodes]
        self.resized: list[tuple[str, int]] = []

    def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        if command == "query-named-block-nodes":
            return self.nodes
        assert command == "block_resize" and arguments is not None
        return self.resized.append((arguments["node-name"], arguments["size"]))


class TellSizeTest(TestCase):
    other = ("other", "raw", "/dev/mapper/virtman-vm-ab")

    def test_the_node_of_the_format_is_resized_which_passes_it_on(self) -> None:
        qemu = QemuDouble(self.other, ("format", "raw", str(DISK)), ("storage", "host_device", str(DISK)))
        tell_size(qemu, DISK, 1 << 20)
        self.assertEqual([("format", 1 << 20)], qemu.resized)

    def test_without_a_format_the_device_is(self) -> None:
        qemu = QemuDouble(("storage", "host_device", str(DISK)), self.other)
        tell_size(qemu, DISK, 1 << 20)
        self.assertEqual([("storage", 1 << 20)], qemu.resized)

    def test_a_vm_without_the_disk_is_told_of(self) -> None:
        qemu = QemuDouble(self.other)
        self.assertRaises(MonitorFailed, tell_size, qemu, DISK, 1 << 20)
        self.assertEqual([], qemu.resized)
