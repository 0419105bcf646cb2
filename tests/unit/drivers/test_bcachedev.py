"""What tells bcache something outlives who has it told, since the kernel does not cope with his death; and its sets."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from testtools import TestCase

from drivers.kernel.bcachedev import attached, have_told
from lab.process import attempts
from tests.patience import PATIENCE
from tests.unit.virtman.scene import folder_for


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

    def test_a_set_that_has_gone_has_none(self) -> None:
        self.assertEqual([], attached(self.folder / "gone"))
