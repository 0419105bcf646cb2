"""Private disks of VMs over a served image."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from drivers.errors import BadDisk, CommandFailed, NoSpace
from drivers.snapshot.qcow2 import Qcow2Disks
from tests.limits import killed_at_its_end
from tests.patience import PATIENCE
from tests.userspace.drivers.hosts import MIB, HostCase, until


def qemu_io_disk(path: Path, *commands: str) -> subprocess.CompletedProcess[str]:
    """Run commands of qemu-io on a disk that is named by nothing but its path."""
    argv = ["qemu-io"]
    for command in commands:
        argv += ["-c", command]
    return subprocess.run([*argv, str(path)], capture_output=True, text=True, check=True)


class SnapshotCase(HostCase):
    """A host ``h`` that serves an image."""

    def setUp(self) -> None:
        super().setUp()
        self.image, self.file, (self.h,) = self.chain(0)
        self.origin = self.h.export.local(self.image)
        self.folder, self.store = (self.h.place.state / name for name in ("snapshots", "snapshots/.layers"))

    def create(self, vm: str = "vm1", size: int | None = None) -> Path:
        device = self.h.snapshot.create(vm, self.origin, size or self.image.size)
        assert device.path is not None
        return device.path


class CreateTest(SnapshotCase):
    def test_writes_stay_in_the_disk(self) -> None:
        one, two = self.create("vm1"), self.create("vm2")
        qemu_io_disk(one, "write -P 0x77 1M 64k")
        qemu_io_disk(one, "read -P 0x77 1M 64k")
        compare = ["qemu-img", "compare", "-f", "qcow2", "-F", "raw", str(two), str(self.file)]
        self.assertEqual(0, subprocess.run(compare, check=False, stdout=subprocess.DEVNULL).returncode)
        self.assert_same(self.h.uri(self.image), self.file)

    def test_small_write_fetches_nothing(self) -> None:
        host = self.host("h1")
        host.join(self.image, [self.h])
        disk = host.snapshot.create("vm", host.export.local(self.image), self.image.size)
        assert disk.path is not None
        qemu_io_disk(disk.path, "write 1M 4k")
        self.assertEqual(0, host.held(self.image))

    def test_larger_disk_ends_in_zeros(self) -> None:
        path = self.create(size=16 * MIB)
        qemu_io_disk(path, "read -P 0 8M 8M")

    def test_full_disk_is_refused(self) -> None:
        self.small_file_system(self.store, MIB // 2)
        self.assertRaises(NoSpace, self.create)
        self.assertEqual([], [*self.folder.glob("[!.]*"), *self.store.iterdir()])

    def test_disk_that_cannot_be_written_leaves_nothing(self) -> None:
        self.small_file_system(self.store, 8 * MIB, files=0)
        self.assertRaises(NoSpace, self.create)
        self.assertEqual(frozenset(), self.h.snapshot.existing())

    def test_disk_that_was_not_made_to_the_end_leaves_nothing(self) -> None:
        with killed_at_its_end("qemu-img"):
            self.assertRaises(CommandFailed, self.create)
        self.assertEqual([], [*self.folder.glob("[!.]*"), *self.store.iterdir()])

    def test_a_file_system_that_runs_full_below_disks_is_told_of(self) -> None:
        self.small_file_system(self.folder, 8 * MIB)
        self.store.mkdir()
        self.assertEqual("", self.h.snapshot.trouble())
        self.create()
        driver = Qcow2Disks(replace(self.h.place, reserve=4 * MIB))
        self.assertEqual("", driver.trouble())
        (self.store / "large").write_bytes(bytes(4 * MIB))
        self.assertIn(f"{self.store} has 3 MiB free", driver.trouble())

    def test_half_made_disk_is_made_anew(self) -> None:
        layers = self.folder / "vm1"
        layers.mkdir()
        for half in (layers / "0.new", layers / "0.qcow2", layers / "3.qcow2"):
            half.write_bytes(b"half")
        self.create()
        there = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))
        self.assertEqual([".layers", ".layers/0.qcow2", "vm1", "vm1/0.qcow2", "vm1/disk.qcow2"], there)


class OpenTest(SnapshotCase):
    def test_file_of_something_else_is_refused(self) -> None:
        path = self.create()
        path.write_bytes(b"x" * 1000)
        self.assertRaises(BadDisk, self.h.snapshot.open, "vm1")
        path.unlink()
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(path), "1M"], check=True)
        self.assertRaises(BadDisk, self.h.snapshot.open, "vm1")
        path.write_bytes(b"QFI\xfb")
        self.assertRaises(BadDisk, self.h.snapshot.open, "vm1")


class VirtualMachineTest(SnapshotCase):
    def test_vm_given_only_the_path_outlives_the_daemon_behind_it(self) -> None:
        self.require("qemu-system-x86_64")
        drive = f"file={self.create()},format=qcow2,if=none,id=disk"
        argv = ["qemu-system-x86_64", "-machine", "none", "-nodefaults", "-display", "none", "-monitor", "stdio"]
        vm = subprocess.Popen(
            [*argv, "-drive", drive], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.addCleanup(vm.wait)
        self.addCleanup(vm.kill)
        assert vm.stdin is not None
        vm.stdin.write(b'qemu-io disk "read 0 1M"\n')
        vm.stdin.flush()
        self.h.kill_daemon(self.image)
        until(lambda: self.h.died == [self.image.name])
        vm.stdin.write(b'qemu-io disk "read 1M 1M"\n')
        vm.stdin.flush()
        self.h.serve_file(self.image, self.file)
        said, _ = vm.communicate(b"quit\n", timeout=PATIENCE)
        self.assertEqual(2, said.count(b"1 MiB, 1 ops"), said.decode(errors="replace"))
