"""Disks come to a QEMU and go, whatever was done with them meanwhile; no guest runs in it."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testtools import TestCase

from drivers.base import BlockNode, Monitor
from drivers.errors import DiskInUse, MonitorFailed
from drivers.qemu.hotplug import CONTROLLER, plug, unplug
from drivers.qemu.monitor import Client, private_node
from drivers.qemu.nodes import Nodes
from tests.patience import PATIENCE
from tests.programs import require
from tests.userspace.drivers.qemus import PROGRAM, monitored

MIB = 1 << 20


class Cut(Exception):
    """The agent is killed here."""


class CutMonitor:
    """A monitor whose caller is killed after a command."""

    def __init__(self, monitor: Monitor, command: str) -> None:
        self._monitor, self._command = monitor, command

    def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        answer = self._monitor.execute(command, arguments)
        if command == self._command:
            raise Cut
        return answer


class HotplugTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        require(self, PROGRAM)
        folder = tempfile.TemporaryDirectory(dir="/tmp", prefix="hotplug-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def with_controller(self) -> Client:
        """The monitor of a QEMU with a controller, whose processors stand still."""
        options = ["-S", "-device", f"virtio-scsi-pci,id={CONTROLLER}"]
        process, monitor = monitored(*options, said=subprocess.DEVNULL)
        self.addCleanup(monitor.close)
        self.addCleanup(process.wait, PATIENCE)
        self.addCleanup(process.kill)
        return monitor

    def file(self, name: str) -> BlockNode:
        path = self.folder / name
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", path, "1M"], check=True)
        return {"driver": "qcow2", "file": {"driver": "file", "filename": str(path)}}

    def disk(self, name: str = "data") -> dict[str, Any]:
        """Two layers over something else, of which the lower one has a name of its own."""
        image = {"driver": "raw", "file": {"driver": "null-co", "size": MIB}}
        return {
            **self.file(name),
            "backing": {**self.file(f"{name}-below"), "node-name": f"{name}-below", "backing": image},
        }

    def nodes(self, monitor: Monitor) -> list[str]:
        return [node["node-name"] for node in monitor.execute("query-named-block-nodes", {"flat": True})]

    def shown(self, monitor: Monitor) -> list[str]:
        """The disks that the guest has."""
        return [block["qdev"] for block in monitor.execute("query-block") if block.get("inserted")]

    def test_it_comes_and_goes_and_may_come_again(self) -> None:
        monitor, disk = self.with_controller(), self.disk()
        for _ in range(3):
            for _ in range(2):
                plug(monitor, "data", disk)
                self.assertEqual(["virtman-with-data"], self.shown(monitor))
            for _ in range(2):
                unplug(monitor, "data", disk)
                self.assertEqual(([], []), (self.shown(monitor), self.nodes(monitor)))

    def test_several_have_nothing_to_do_with_each_other(self) -> None:
        monitor, disks = self.with_controller(), {name: self.disk(name) for name in ("one", "two")}
        for name, disk in disks.items():
            plug(monitor, name, disk)
        unplug(monitor, "one", disks["one"])
        self.assertEqual(["virtman-with-two"], self.shown(monitor))
        self.assertEqual(6, len(self.nodes(monitor)))

    def test_one_that_has_got_a_layer_meanwhile_goes_with_it(self) -> None:
        monitor, disk = self.with_controller(), self.disk()
        plug(monitor, "data", disk)
        over = self.file("over")
        monitor.execute("blockdev-add", {**over, "backing": None, "node-name": "over"})
        below = Nodes(monitor).demand(Path(disk["file"]["filename"]))
        monitor.execute("blockdev-snapshot", {"node": below, "overlay": "over"})
        unplug(monitor, "data", {**over, "backing": disk})
        self.assertEqual(([], []), (self.shown(monitor), self.nodes(monitor)))

    def test_a_call_that_was_cut_off_can_be_made_again(self) -> None:
        monitor, disk = self.with_controller(), self.disk()
        for command in ("blockdev-add", "device_add"):
            self.assertRaises(Cut, plug, CutMonitor(monitor, command), "data", disk)
            plug(monitor, "data", disk)
            self.assertEqual(["virtman-with-data"], self.shown(monitor))
            self.assertRaises(Cut, unplug, CutMonitor(monitor, "device_del"), "data", disk)
            unplug(monitor, "data", disk)
            self.assertEqual(([], []), (self.shown(monitor), self.nodes(monitor)))

    def test_what_fails_leaves_nothing(self) -> None:
        monitor = self.with_controller()
        missing = {"driver": "qcow2", "file": {"driver": "file", "filename": str(self.folder / "none")}}
        self.assertRaises(MonitorFailed, plug, monitor, "data", missing)
        disk = self.disk()
        with private_node("theirs", disk):
            self.assertRaises(DiskInUse, plug, monitor, "data", disk)
        self.assertEqual(([], []), (self.shown(monitor), self.nodes(monitor)))
