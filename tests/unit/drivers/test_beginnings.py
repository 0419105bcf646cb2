"""Reading what may never answer: a FIFO to which nobody writes yet."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from testtools import TestCase

from drivers.errors import ToolMissing
from drivers.host.beginnings import LENGTH, Beginnings
from tests.patience import PATIENCE
from tests.userspace.drivers.hosts import until

SHORT = 1.0


class BeginningsTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="vm-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.slow = self.folder / "slow"
        os.mkfifo(self.slow)

    def readers(self) -> list[str]:
        """The processes that read it."""
        lines = []
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # processes come and go
                lines.append(each.read_bytes())
        return [line.decode() for line in lines if f"if={self.slow}\0".encode() in line]

    def answer(self, text: str) -> None:
        """Have who waits for it get this, at last."""
        self.slow.write_text(text)

    def test_what_can_be_read(self) -> None:
        file = self.folder / "file"
        file.write_bytes(b"virtman\xff" + bytes(2 * LENGTH))
        found = Beginnings(PATIENCE).of(file)
        self.assertEqual(("virtman\ufffd", LENGTH), (str(found)[:8], len(found or "")))
        self.assertIsNone(Beginnings(PATIENCE).of(self.folder / "missing"))

    def test_one_that_does_not_answer_is_read_once_and_nobody_else_waits_for_it(self) -> None:
        beginnings = Beginnings(SHORT)
        self.assertIsNone(beginnings.of(self.slow))
        until(lambda: len(self.readers()) == 1)
        for _ in range(3):
            self.assertIsNone(beginnings.of(self.slow))
        self.assertEqual(1, len(self.readers()))
        self.answer("here")
        until(lambda: not self.readers())

    def test_who_cannot_ask_is_told_so(self) -> None:
        path = os.environ["PATH"]
        self.addCleanup(os.environ.__setitem__, "PATH", path)
        os.environ["PATH"] = str(self.folder)
        self.assertRaises(ToolMissing, Beginnings(PATIENCE).of, self.slow)
