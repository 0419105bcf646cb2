"""Loop devices over files of the guest's disk, and of one with larger sectors."""

from __future__ import annotations

import shutil
import struct
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from testtools import TestCase

from drivers.host.command import run
from drivers.kernel import loopdev, udevrules
from tests.kernel.inside import loops
from tests.kernel.inside.filesystems import small_file_system


class LoopsTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
        self.addCleanup(shutil.rmtree, self.folder)

    def kind(self, folder: Path) -> str:
        """Whether the loop device of a file goes past the page cache, and the bytes of its sectors."""
        file = folder / "file"
        file.write_bytes(bytes(1 << 20))
        self.addCleanup(loopdev.detach, file)
        return " ".join(run(["losetup", "-n", "-O", "DIO,LOG-SEC", str(loopdev.attach(file))]).stdout.split())

    def test_a_file_is_read_past_the_page_cache(self) -> None:
        self.assertEqual("1 512", self.kind(self.folder))

    def test_a_file_has_one_loop_device_by_whatever_path(self) -> None:
        file = self.folder / "file"
        file.write_bytes(bytes(1 << 20))
        device = loopdev.attach(file)
        self.addCleanup(loopdev.detach, file)
        other = self.folder.with_name(f"{self.folder.name}-link")
        other.symlink_to(self.folder)
        self.addCleanup(other.unlink)
        self.assertEqual(device, loopdev.attach(other / "file"))

    def test_udev_knows_what_is_on_a_new_loop_device_of_somebody_else_and_its_partition(self) -> None:
        loops.remove_unused()
        file = self.folder / "file"
        with file.open("wb") as opened:
            opened.truncate(4 << 20)
        run(["mkfs.ext4", "-q", str(file)])
        device = loopdev.attach(file)
        self.addCleanup(loopdev.detach, file)
        parted = self.folder / "parted"
        with parted.open("wb") as opened:
            for place, content in (
                (446, struct.pack("<8B2I", 0, 0, 0, 0, 0x83, 0, 0, 0, 2048, 8192)),  # the first partition
                (510, b"\x55\xaa"),
                (2048 * 512, file.read_bytes()),
            ):
                opened.seek(place)
                opened.write(content)
        other = run(["losetup", "--find", "--show", "--partscan", str(parted)]).stdout.strip()
        self.addCleanup(loopdev.detach, parted)
        run(["udevadm", "settle"])
        for node in (str(device), f"{other}p1"):
            self.assertIn("ID_FS_TYPE=ext4", run(["udevadm", "info", node]).stdout)
            self.assertNotIn("SYSTEMD_READY=0", run(["udevadm", "info", node]).stdout)

    def test_udev_knows_our_devices_before_the_first_one_is_made(self) -> None:
        udevrules.leave_alone(self.folder)
        udevrules.FILE.unlink(missing_ok=True)
        run(["udevadm", "control", "--reload"])
        self.assertTrue(self.is_left_alone(self.folder / "first"))

    def test_udev_leaves_the_files_of_an_agents_folder_alone_by_whatever_path(self) -> None:
        link = self.folder / "state"
        (self.folder / "disk+1").mkdir()
        link.symlink_to(self.folder / "disk+1")
        before = self.is_left_alone(link / "before")
        udevrules.leave_alone(link)
        self.assertEqual((False, True), (before, self.is_left_alone(link / "after")))

    def is_left_alone(self, file: Path) -> bool:
        """Whether udev does not probe the loop device of a file."""
        file.write_bytes(bytes(1 << 20))
        self.addCleanup(loopdev.detach, file)
        device = loopdev.attach(file)
        run(["udevadm", "settle"])
        return "SYSTEMD_READY=0" in run(["udevadm", "info", str(device)]).stdout

    def test_what_somebody_else_has_over_a_file_is_not_used_and_stays(self) -> None:
        file = self.folder / "file"
        file.write_bytes(bytes(1 << 20))
        for options in (["--read-only"], ["--sector-size=4096"], ["--offset=65536"]):
            others = run(["losetup", "--find", "--show", *options, str(file)]).stdout.strip()
            self.addCleanup(run, ["losetup", "--detach", others])
            with loopdev.held(file) as device:
                shown = run(["losetup", "-n", "-O", "RO,LOG-SEC,OFFSET", str(device)]).stdout.split()
                self.assertEqual(["1", "512", "0"], shown)
            run(["udevadm", "settle"])  # it may have the device open for a look
            self.assertIn(others, run(["losetup", "--associated", str(file)]).stdout)

    def test_a_file_that_several_hold_side_by_side_is_behind_the_devices_of_all(self) -> None:
        files = [self.folder / name for name in ("a", "b")]
        for file in files:
            file.write_bytes(file.name.encode() * (1 << 20))

        def read(file: Path) -> bytes:
            with loopdev.held(file) as device, device.open("rb") as opened:
                return opened.read(1)

        with ThreadPoolExecutor(8) as pool:
            self.assertEqual([b"a", b"b"] * 50, list(pool.map(read, files * 50)))
        run(["udevadm", "settle"])  # it may have a device open for a look
        self.assertEqual([None, None], [loopdev.device_of(file) for file in files])

    def test_a_new_file_of_a_lost_ones_name_has_no_loop_device(self) -> None:
        file = self.folder / "file"
        file.write_bytes(bytes(1 << 20))
        self.addCleanup(run, ["losetup", "--detach", str(loopdev.attach(file))])
        file.rename(self.folder / "lost")
        file.write_bytes(bytes(1 << 20))
        self.assertEqual(None, loopdev.device_of(file))

    def test_sectors_are_of_512_bytes_also_on_a_disk_with_larger_ones_and_the_log_says_what_that_costs(self) -> None:
        with self.assertLogs("drivers.kernel.loopdev", "INFO") as logged:
            self.assertEqual("0 512", self.kind(small_file_system(self, self.folder, "16M", sector=4096)))
        self.assertIn("page cache", logged.output[0])
