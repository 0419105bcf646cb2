"""Clones of VMs, and files and images of what their disks hold, with the real drivers of the userspace stack."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

from lab.process import processes_of
from tests.patience import wait_until
from tests.programs import qemu_io
from tests.userspace.test_cluster import ClusterTestCase
from virtman import errors
from virtman.models import Vm

MIB = 1 << 20


def write(vm: Vm, pattern: int, offset: int, length: int) -> None:
    """Write to a VM's disk, as its QEMU would."""
    qemu_io(vm.disk.path, f"write -P {pattern} {offset} {length}")


class CopiesTestCase(ClusterTestCase):
    """A VM on a host, which has changed the third MiB of its disk; ``now`` is a file with what the disk holds."""

    def setUp(self) -> None:
        super().setUp()
        [(self.h1, self.client)] = self.hosts(1)
        self.vm = self.client.create("vm", "img")
        write(self.vm, 0x77, 2 * MIB, MIB)
        self.now = self.folder / "now.raw"
        content = self.file.read_bytes()
        self.now.write_bytes(content[: 2 * MIB] + b"\x77" * MIB + content[3 * MIB :])
        self.target = self.folder / "target"


class SnapshotTest(CopiesTestCase):
    def test_a_block_node_that_somebody_kept_never_opens_what_a_snapshot_keeps(self) -> None:
        node = "json:" + json.dumps(self.vm.disk.blockdev)
        self.client.take_snapshot("vm", "then")
        write(self.vm, 0x55, 6 * MIB, MIB)
        qemu_io(node, f"write -P 0x66 {7 * MIB} {MIB}", options=())
        content = self.now.read_bytes()
        changed = self.folder / "changed.raw"
        changed.write_bytes(content[: 6 * MIB] + b"\x55" * MIB + b"\x66" * MIB)
        self.assert_same_content(Path(self.vm.disk.path), changed)
        self.client.revert("vm", "then")
        self.assert_same_content(Path(self.vm.disk.path), self.now)


class ExportTest(CopiesTestCase):
    def test_the_disk_of_a_vm(self) -> None:
        for image_format in ("raw", "qcow2"):
            answer = self.client.export_vm("vm", self.target, image_format)
            self.assertEqual((image_format, 8 * MIB), (answer.format, answer.size))
            argv = ["qemu-img", "compare", "-f", image_format, "-F", "raw", str(self.target), str(self.now)]
            subprocess.run(argv, check=True, capture_output=True)
            self.target.unlink()
        self.assertEqual([], self.client.snapshots("vm"))

    def test_an_image_that_this_host_did_not_have(self) -> None:
        self.client.destroy("vm")
        self.client.gc()
        self.client.export_image("img", self.target)
        self.assertEqual(self.file.read_bytes(), self.target.read_bytes())

    def test_killed_with_the_agent_nothing_is_left(self) -> None:
        (daemon,) = self.origin.daemons()
        os.kill(daemon, signal.SIGSTOP)  # what the host has not fetched yet is not answered
        self.addCleanup(os.kill, daemon, signal.SIGCONT)

        def export() -> None:
            self.assertRaises(errors.VirtmanError, self.client.export_vm, "vm", self.target)

        thread = threading.Thread(target=export)
        thread.start()
        self.addCleanup(thread.join)
        wait_until(lambda: self.copying(), "the copy has begun")
        self.h1.kill()
        wait_until(lambda: not self.copying(), "the copy has ended")
        self.assertFalse([path for path in self.folder.iterdir() if "target" in path.name])
        os.kill(daemon, signal.SIGCONT)
        client = self.h1.start()
        client.repair()
        self.assertEqual([], client.snapshots("vm"))
        self.assertEqual(1, len(client.export_vm("vm", self.target).model_dump(include={"file"})))
        self.assertEqual(self.now.read_bytes(), self.target.read_bytes())

    def copying(self) -> bool:
        """Whether qemu-img reads a disk of the host."""
        return any("qemu-img" in line for line in processes_of(self.h1.state / "snapshots/.layers").values())


class PublishTest(CopiesTestCase):
    def test_the_disk_of_a_vm_becomes_an_image_for_others(self) -> None:
        image = self.client.publish_vm("prepared", "vm")
        write(self.vm, 0x44, 0, MIB)
        self.assertEqual(8 * MIB, image.size)
        other = self.origin.client()
        self.assert_same_content(Path(other.create("new", "prepared").disk.path), self.now)
