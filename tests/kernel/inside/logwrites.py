"""A disk whose writes are logged, so that each state is known that a power cut could have left.

Nothing that the chunk store writes is flushed. So a power cut may keep any of its writes, and parts of them.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from pathlib import Path

from testtools import TestCase

from drivers.host.command import run

_SECTOR = 512
_MAGIC, _VERSION = 0x6A736677736872, 1
_SUPER, _ENTRY = struct.Struct("<QQQI"), struct.Struct("<QQQQ")
_DISCARD = 1 << 2
"""Linux: drivers/md/dm-log-writes.c."""

MOST = 3
"""One write of so many does not come to the disk as a whole."""


@dataclass(frozen=True)
class Write:
    """``data`` at ``offset``, in bytes."""

    offset: int
    data: bytes


class LoggedDisk:
    """``path``: an empty disk of ``size`` bytes by the target log-writes."""

    NAME = "test-logged"

    def __init__(self, case: TestCase, folder: Path, size: int) -> None:
        self._size = size
        self._log = folder / "log"
        disk = self._loop(case, folder / "disk", size)
        log = self._loop(case, self._log, 16 * size)
        run(["dmsetup", "create", self.NAME, "--table", f"0 {size // _SECTOR} log-writes {disk} {log}"])
        self._is_there = True
        case.addCleanup(self.remove)
        self.path = Path("/dev/mapper", self.NAME)

    @staticmethod
    def _loop(case: TestCase, file: Path, size: int) -> str:
        run(["truncate", "--size", str(size), str(file)])
        loop = run(["losetup", "--find", "--show", str(file)]).stdout.strip()
        case.addCleanup(run, ["losetup", "--detach", loop])
        return loop

    def remove(self) -> None:
        """Take the disk away; its log stays."""
        if self._is_there:
            run(["dmsetup", "remove", "--retry", self.NAME])
            self._is_there = False

    def writes(self) -> list[Write]:
        """All writes, in the order in which the disk got them. The disk is gone afterwards."""
        self.remove()
        found = []
        with self._log.open("rb") as log:
            magic, version, count, sector = _SUPER.unpack(log.read(_SUPER.size))
            assert (magic, version) == (_MAGIC, _VERSION)
            at = sector
            for _ in range(count):
                log.seek(at)
                start, length, flags, _ = _ENTRY.unpack(log.read(_ENTRY.size))
                at += sector
                if flags & _DISCARD or not length:
                    continue
                log.seek(at)
                found.append(Write(start * _SECTOR, log.read(length * _SECTOR)))
                at += -(-length * _SECTOR // sector) * sector
        return found

    def cut_off(self, writes: list[Write], chooser: random.Random, to: Path) -> None:
        """A file with what a power cut at some moment left: most of the writes before it, and parts of some."""
        with to.open("wb") as file:
            file.truncate(self._size)
            for write in writes[: chooser.randint(1, len(writes))]:
                sectors = len(write.data) // _SECTOR
                if write.offset and not chooser.randrange(MOST):  # the mark was there before
                    sectors = chooser.randrange(sectors)
                file.seek(write.offset)
                file.write(write.data[: sectors * _SECTOR])
