"""What the tests of kernel disks for VMs have in common."""

from __future__ import annotations

import os
import shutil
import tempfile
from abc import abstractmethod
from pathlib import Path

from testtools import TestCase

from drivers import loopdev
from drivers.base import Device, SnapshotDriver
from drivers.command import run

MIB = 1 << 20
SIZE = 16 * MIB


class DiskCase(TestCase):
    """A read-only device ``origin`` and the ``driver`` on an empty folder. All maps and loops are gone afterwards."""

    def setUp(self) -> None:
        super().setUp()
        self.before = self.listing()
        self.addCleanup(lambda: self.assertEqual(self.before, self.listing()))
        self.folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.content = os.urandom(SIZE)
        file = self.folder / "image"
        file.write_bytes(self.content)
        self.origin = Device(size=SIZE, path=loopdev.attach(file, read_only=True))
        self.addCleanup(loopdev.detach, file)
        self.driver: SnapshotDriver = self.new_driver()
        self.addCleanup(self.delete_all)

    @abstractmethod
    def new_driver(self) -> SnapshotDriver:
        """A driver on ``folder``, as an agent that starts has it."""

    def delete_all(self) -> None:
        for vm in self.driver.existing().names:
            self.driver.delete(vm)

    @staticmethod
    def listing() -> list[str]:
        return run(["dmsetup", "ls"]).stdout.splitlines() + run(["losetup", "--list", "-n"]).stdout.splitlines()

    def create(self, vm: str = "vm1", size: int = SIZE) -> Path:
        path = self.driver.create(vm, self.origin, size).path
        assert path is not None
        return path


def write(path: Path, offset: int, data: bytes) -> None:
    """Write to a device, to its very disk."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def small_file_system(case: DiskCase, size: str) -> Path:
    """A mounted file system in a file of ``size``."""
    small = case.folder / "small"
    image = case.folder / "small.ext4"
    run(["truncate", "-s", size, str(image)])
    run(["mke2fs", "-q", "-t", "ext4", str(image)])
    small.mkdir()
    run(["mount", "-o", "loop", str(image), str(small)])
    case.addCleanup(run, ["umount", str(small)])
    return small


def fill(folder: Path, *, but: int) -> Path:
    """A file that takes all the room of a file system but so many bytes."""
    ballast = folder / "ballast"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - but)
    return ballast
