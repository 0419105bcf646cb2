"""VMs' qcow2 disks do what VMs' disks have to."""

from __future__ import annotations

import subprocess

from drivers.base import Device, Place
from drivers.blocks import open_blocks
from drivers.errors import DiskInUse
from drivers.snapshot.qcow2 import Qcow2Disks
from tests.contracts import drivers as contracts
from tests.userspace.drivers.chunkhosts import MIB, ChunkHostCase
from tests.userspace.drivers.qemus import Vm, stranger, write_disk


class Qcow2DisksTest(ChunkHostCase, contracts.VmDiskContract, contracts.SnapshotContract):
    """Over an image that a host serves."""

    def setUp(self) -> None:
        super().setUp()
        self.image, file = self.make_image(MIB)
        host = self.host("h")
        host.serve_file(self.image, file)
        self.origin = host.source.device(self.image)
        self.place = Place(state=self.root / "state", run=self.root / "run")

    def make(self) -> Qcow2Disks:
        return Qcow2Disks(self.place)

    def write(self, device: Device, text: bytes) -> None:
        source = self.root / "text"
        source.write_bytes(text)
        write_disk(device.path, source)

    def read(self, device: Device, length: int) -> bytes:
        target = self.root / "read"
        argv = ["qemu-img", "dd", "-f", "qcow2", "-O", "raw", "bs=512", "count=1", f"if={device.path}", f"of={target}"]
        subprocess.run(argv, check=True, capture_output=True)
        return target.read_bytes()[:length]

    def discard(self, device: Device, length: int) -> None:
        vm = Vm(device)
        self.addCleanup(vm.kill)
        vm.io(f"discard 0 {length}")
        vm.kill()

    def test_a_snapshot_is_read_by_several_while_the_disk_is_in_use(self) -> None:
        driver = self.vm_disk()
        self.wrote(driver, b"then")
        device = driver.take("vm", "snapshot", None)
        with (
            stranger(contracts.path_of(device)),
            driver.reading("vm", "snapshot") as snapshot,
            open_blocks("vm", snapshot) as one,
            open_blocks("vm", snapshot) as another,
        ):
            self.assertEqual([b"then"] * 2, [blocks.read(0, 512)[:4] for blocks in (one, another)])

    def test_a_disk_that_a_stranger_has_open_is_left_alone(self) -> None:
        driver = self.vm_disk()
        device = driver.take("vm", "snapshot", None)
        self.write(device, b"late")
        with stranger(contracts.path_of(device)):
            self.assert_others_are_told_of(driver)
            before = sorted(self.place.state.rglob("*"))
            self.assertRaises(DiskInUse, driver.take, "vm", "other", None)
            self.assertRaises(DiskInUse, driver.drop, "vm", "snapshot", None)
            self.assertRaises(DiskInUse, driver.resize, "vm", 2 * self.origin.size, None)
            self.assertEqual(self.origin.size, driver.resize("vm", self.origin.size, None).size)
            self.assertEqual(before, sorted(self.place.state.rglob("*")))
            self.assertEqual({"snapshot"}, driver.snapshots("vm"))
        self.assert_holds(driver, b"late")
        driver.revert("vm", "snapshot")
