"""What tells bcache something outlives who has it told, since the kernel does not cope with his death; and its sets."""

from __future__ import annotations

import errno
import os
import signal
import stat
from pathlib import Path

from testtools import TestCase

from drivers.kernel.bcachedev import attached, have_told
from lab.process import attempts
from tests.patience import PATIENCE
from tests.unit.virtman.scene import folder_for

MISC, NOBODYS = 10, 254
"""A device of the kernel's that no driver has: who opens it is told so (Linux: drivers/char/misc.c, misc_open)."""


class ToldTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.file = folder_for(self) / "register"
        os.mkfifo(self.file)

    def test_it_is_told_though_the_process_is_killed_meanwhile(self) -> None:
        pid = os.fork()
        if not pid:
            have_told(self.file, "a map")  # waits for a reader
            os._exit(1)
        proc = Path(f"/proc/{pid}")
        for _ in attempts(PATIENCE):
            if next(proc.glob("task/*/children")).read_text() or "partner" in (proc / "wchan").read_text():
                break
        os.kill(pid, signal.SIGKILL)
        self.assertEqual(signal.SIGKILL, os.WTERMSIG(os.waitpid(pid, 0)[1]))
        fd = os.open(self.file, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, fd)
        told = b""
        for _ in attempts(PATIENCE / 4):
            try:
                told += os.read(fd, 100)
            except BlockingIOError:
                continue
            if told:
                break
        self.assertEqual(b"a map", told)


class AttachedTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.home = self.folder / "set"
        self.home.mkdir()

    def member(self, name: str) -> Path:
        """The folder of a device that is attached."""
        device = self.folder / name
        (device / "bcache").mkdir(parents=True)
        (self.home / f"bdev{len(list(self.home.iterdir()))}").symlink_to(device / "bcache")
        return device

    def test_maps_have_their_names_and_other_devices_the_kernels(self) -> None:
        (self.member("dm-2") / "dm").mkdir()
        (self.folder / "dm-2/dm/name").write_text("virtman-cacheof-debian\n")
        self.member("sdb")
        self.assertEqual(["virtman-cacheof-debian", "sdb"], attached(self.home))

    def test_a_map_that_leaves_meanwhile_is_left_out(self) -> None:
        self.member("dm-1")
        (self.home / "bdev1").symlink_to(self.folder / "dm-3/bcache")
        self.assertEqual([], attached(self.home))

    def test_one_whose_files_are_of_a_device_that_goes_just_now_is_left_out(self) -> None:
        name = self.member("dm-1") / "dm/name"
        name.parent.mkdir()
        try:
            os.mknod(name, stat.S_IFCHR, os.makedev(MISC, NOBODYS))
            error = self.assertRaises(OSError, name.open).errno
        except PermissionError:
            error = errno.EACCES
        if error == errno.EACCES:
            self.skipTest("only root makes devices, and not on a file system that is mounted with nodev")
        self.assertEqual(errno.ENODEV, error)
        self.assertEqual([], attached(self.home))

    def test_one_that_cannot_be_read_for_another_reason_is_not_left_out(self) -> None:
        (self.member("dm-1") / "dm/name").mkdir(parents=True)
        self.assertRaises(IsADirectoryError, attached, self.home)

    def test_a_set_that_has_gone_has_none(self) -> None:
        self.assertEqual([], attached(self.folder / "gone"))
