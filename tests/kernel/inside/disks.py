"""What the tests of kernel disks for VMs have in common."""

from __future__ import annotations

import os
import stat
from abc import abstractmethod
from pathlib import Path

from testtools import TestCase

from drivers.base import Device, VmDiskDriver
from drivers.host.command import run
from drivers.kernel import loopdev
from tests.contracts import drivers as contracts
from tests.kernel.inside.filesystems import small_file_system
from tests.kernel.inside.folders import state_folder

MIB = 1 << 20
SIZE = 16 * MIB
GROUP = 1
"""The number of a group that every Debian has, and that no device is of by itself."""


class DiskCase(TestCase):
    """A read-only device ``origin`` and the ``driver`` on an empty folder. All maps and loops are gone afterwards."""

    def setUp(self) -> None:
        super().setUp()
        self.before = self.listing()
        self.addCleanup(lambda: self.assertEqual(self.before, self.listing()))
        self.folder = state_folder(self)
        self.content = os.urandom(SIZE)
        file = self.folder / "image"
        file.write_bytes(self.content)
        self.origin = Device(size=SIZE, path=loopdev.attach(file, read_only=True))
        self.addCleanup(loopdev.detach, file)
        self.driver: VmDiskDriver = self.new_driver()
        self.addCleanup(self.delete_all)

    @abstractmethod
    def new_driver(self) -> VmDiskDriver:
        """A driver on ``folder``, as an agent that starts has it."""

    @abstractmethod
    def crash(self) -> None:
        """The host goes down: no map and no loop device outlives that. ``driver`` is a new one afterwards."""

    @abstractmethod
    def left(self) -> list[str]:
        """The files that the driver has on the disk."""

    def delete_all(self) -> None:
        for vm in self.driver.existing():
            self.driver.delete(vm)

    @staticmethod
    def listing() -> list[str]:
        run(["udevadm", "settle"])  # a loop device that was let go stays until udev has looked at it
        return run(["dmsetup", "ls"]).stdout.splitlines() + run(["losetup", "--list", "-n"]).stdout.splitlines()

    def create(self, vm: str = "vm1", size: int = SIZE) -> Path:
        return contracts.path_of(self.driver.create(vm, self.origin, size))

    def opened(self, vm: str = "vm1") -> Path:
        return contracts.path_of(self.driver.open(vm))


class EveryDriver(DiskCase, contracts.VmDiskContract):
    """What holds for each driver of kernel disks, besides the contract of all drivers."""

    def make(self) -> VmDiskDriver:
        return self.new_driver()

    def test_a_disk_and_nothing_else_is_the_groups(self) -> None:
        disk = self.create()
        found = {path: path.stat() for path in Path("/dev/mapper").iterdir()}
        (ours,) = (path for path, one in found.items() if one.st_gid == GROUP)
        self.assertEqual((disk, 0o660), (ours, stat.S_IMODE(found[ours].st_mode)))

    def test_writes_stay_in_the_disk_also_when_it_is_created_again(self) -> None:
        one, two = self.create("vm1"), self.create("vm2")
        write(one, 3 * MIB + 512, b"w" * 1024)
        expected = self.content[: 3 * MIB + 512] + b"w" * 1024 + self.content[3 * MIB + 1536 :]
        self.assertEqual(expected, one.read_bytes())
        self.assertEqual(expected, self.create("vm1").read_bytes())
        self.assertEqual(self.content, two.read_bytes())

    def test_larger_disk_ends_in_zeros_that_can_be_written(self) -> None:
        path = self.create(size=SIZE + 4 * MIB + 512)
        self.assertEqual(self.content + bytes(4 * MIB + 512), path.read_bytes())
        write(path, SIZE - 512, b"w" * 1024)
        write(path, SIZE + 4 * MIB, b"e" * 512)
        expected = self.content[:-512] + b"w" * 1024 + bytes(4 * MIB - 512) + b"e" * 512
        self.assertEqual(expected, path.read_bytes())

    def test_bad_input_is_refused_and_nothing_is_made(self) -> None:
        before = self.listing()
        super().test_bad_input_is_refused_and_nothing_is_made()
        self.assertEqual((before, []), (self.listing(), self.left()))

    def test_deleting_leaves_nothing_and_can_be_repeated(self) -> None:
        before = self.listing()
        super().test_deleting_leaves_nothing_and_can_be_repeated()
        self.assertEqual((before, []), (self.listing(), self.left()))

    def test_a_new_disk_never_shows_writes_of_a_deleted_one(self) -> None:
        keep = self.create("keep")
        write(self.create("vm1", SIZE + MIB), 0, b"secret" * 200000)
        self.driver.delete("vm1")
        self.assertEqual(self.content + bytes(MIB), self.create("vm1", SIZE + MIB).read_bytes())
        self.assertEqual(self.content, keep.read_bytes())

    def test_writes_outlive_the_host_and_a_disk_of_which_nothing_is_active_can_be_deleted(self) -> None:
        write(self.create("vm1", SIZE + MIB), SIZE - 4096, b"w" * 8192)
        self.crash()
        self.assertEqual({"vm1"}, self.driver.existing())
        expected = self.content[:-4096] + b"w" * 8192 + bytes(MIB - 4096)
        self.assertEqual(expected, self.opened().read_bytes())
        self.crash()
        self.driver.delete("vm1")
        self.assertEqual([], self.left())

    def test_disks_may_lie_on_a_file_system_with_sectors_of_4_kib(self) -> None:
        for name in ("driver", "folder"):
            self.addCleanup(setattr, self, name, getattr(self, name))
        self.folder = small_file_system(self, self.folder, "256M", sector=4096)
        self.driver = self.new_driver()
        self.addCleanup(self.delete_all)
        write(self.create(), MIB + 512, b"w" * 512)
        self.crash()
        path = self.opened()
        self.assertEqual(self.content[: MIB + 512] + b"w" * 512 + self.content[MIB + 1024 :], path.read_bytes())
        self.assertEqual("512", run(["blockdev", "--getss", str(path)]).stdout.strip())


def write(path: Path, offset: int, data: bytes) -> None:
    """Write to a device, to its very disk."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
