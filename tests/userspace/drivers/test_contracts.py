"""The drivers of the userspace stack do what drivers have to."""

from __future__ import annotations

import subprocess

from drivers.attach.nbd import NbdAttach
from drivers.base import Device
from drivers.blocks import open_blocks
from drivers.cache.qcow2 import Qcow2Cache
from drivers.errors import DiskInUse
from drivers.export.nbd import NbdExport
from drivers.snapshot.qcow2 import Qcow2Disks
from tests.contracts import drivers as contracts
from tests.userspace.drivers.hosts import MIB, HostCase
from tests.userspace.drivers.qemus import Vm, stranger, write_disk


class UserspaceCase(HostCase):
    """A host ``h`` without anything, an image, and two hosts that serve it."""

    def setUp(self) -> None:
        super().setUp()
        self.image, self.file = self.make_image(MIB)
        self.ups = [self.host("a"), self.host("b")]
        for up in self.ups:
            up.serve_file(self.image, self.file)
        self.parents = [up.parent for up in self.ups]
        self.h = self.host("h")


class NbdAttachTest(UserspaceCase, contracts.AttachContract):
    driver: NbdAttach | None = None

    def make(self) -> NbdAttach:
        """One at a time, as agents are: a killed one has no threads any more that restore its links."""
        if self.driver is not None:
            self.driver.close()
        self.driver = NbdAttach(self.h.place, lost=lambda _image, _parent: None)
        self.addCleanup(self.driver.close)
        return self.driver


class Qcow2CacheTest(UserspaceCase, contracts.CacheContract):
    def setUp(self) -> None:
        super().setUp()
        self.base = self.h.attach.connect(self.image, self.parents)

    def make(self) -> Qcow2Cache:
        return Qcow2Cache(self.h.place)

    def use(self, device: Device) -> None:
        self.h.export.publish(self.image, device)
        self.assert_same(self.h.uri(self.image), self.file)

    def release(self) -> None:
        self.h.export.withdraw(self.image.name)


class NbdExportTest(UserspaceCase, contracts.ExportContract):
    def setUp(self) -> None:
        super().setUp()
        self.device = self.h.attach.origin(self.image, self.file)
        self.other = self.h.attach.connect(self.image, self.parents)

    def make(self) -> NbdExport:
        driver = NbdExport(self.h.place, died=lambda _image: None)
        self.addCleanup(driver.close)
        return driver


class Qcow2DisksTest(UserspaceCase, contracts.VmDiskContract, contracts.SnapshotContract):
    def setUp(self) -> None:
        super().setUp()
        self.origin = self.ups[0].export.local(self.image)

    def make(self) -> Qcow2Disks:
        return Qcow2Disks(self.h.place)

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
            before = sorted(self.h.place.state.rglob("*"))
            self.assertRaises(DiskInUse, driver.take, "vm", "other", None)
            self.assertRaises(DiskInUse, driver.drop, "vm", "snapshot", None)
            self.assertRaises(DiskInUse, driver.resize, "vm", 2 * self.origin.size, None)
            self.assertEqual(self.origin.size, driver.resize("vm", self.origin.size, None).size)
            self.assertEqual(before, sorted(self.h.place.state.rglob("*")))
            self.assertEqual({"snapshot"}, driver.snapshots("vm"))
        self.assert_holds(driver, b"late")
        driver.revert("vm", "snapshot")
