"""A file system on a disk that keeps a log of every write and flush, and what a power cut would have left of it.

QEMU's blklogwrites writes the log, in the format of dm-log-writes (Linux: drivers/md/dm-log-writes.c). FUSE makes the
disk a file of this machine, and a loop device makes it one that can be mounted.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from testtools import TestCase

from tests.patience import wait_until

MIB = 1 << 20
SECTOR = 512
FILE_SYSTEM = 96 * MIB
DISK = FILE_SYSTEM + MIB
"""Bytes: behind the file system there is room for marks."""

LOG = 512 * MIB
"""Bytes; the file has holes."""

FLUSH, FUA, DISCARD = 1, 2, 4
"""Flags of an entry."""


@dataclass(frozen=True)
class Cut:
    """The disk (a raw file) as it would be if the power went now, how many marks had been set, and if only just now."""

    disk: Path
    marks: int
    at_mark: bool


class LoggedDisk:
    """A disk with an ext4 in ``root`` until it is unplugged; ``cuts`` then tells what power cuts would have left."""

    def __init__(self, test: TestCase, folder: Path) -> None:
        """Everything it starts ends with the test."""
        self.root = folder / "root"
        self._base, self._log, self._disk = folder / "base", folder / "log", folder / "disk"
        self._cut, self._marks = folder / "cut", 0
        self.root.mkdir()
        self._disk.touch()
        for file, size in ((self._base, DISK), (self._log, LOG)):
            with file.open("wb") as made:
                made.truncate(size)
        self._daemon = subprocess.Popen(self._argv(), stdin=subprocess.DEVNULL)
        test.addCleanup(self._daemon.wait)
        test.addCleanup(self._daemon.terminate)
        wait_until(lambda: self._disk.stat().st_size == DISK, "the disk is there")
        _run("mke2fs", "-q", "-F", "-t", "ext4", str(self._disk), f"{FILE_SYSTEM >> 10}k")
        _run("mount", "-o", f"loop,sizelimit={FILE_SYSTEM}", str(self._disk), str(self.root))
        self._mounted = True
        test.addCleanup(self.unplug)

    def mark(self) -> None:
        """Note in the log that somebody was told that all he had done until now is done."""
        self._marks += 1
        with self._disk.open("r+b", buffering=0) as disk:
            os.pwrite(disk.fileno(), self._marks.to_bytes(SECTOR, "little"), FILE_SYSTEM)

    def unplug(self) -> None:
        """Unmount it."""
        if self._mounted:
            _run("umount", str(self.root))
            self._mounted = False

    def cuts(self) -> Iterator[Cut]:
        """The disk after each flush and at each mark; never with a write that was not flushed.

        The iteration goes on with the file ``disk``, so nobody else may change it.
        """
        marks, waiting = 0, list[tuple[int, bytes]]()
        with self._cut.open("w+b", buffering=0) as disk:
            disk.truncate(DISK)
            for sector, flags, data in self._entries():
                if flags & FLUSH:
                    _apply(disk.fileno(), waiting)
                    waiting.clear()
                    yield Cut(self._cut, marks, at_mark=False)
                if flags & FUA:
                    _apply(disk.fileno(), [(sector, data)])
                elif sector * SECTOR >= FILE_SYSTEM:
                    marks = int.from_bytes(data, "little")
                    yield Cut(self._cut, marks, at_mark=True)
                else:
                    waiting.append((sector, data))

    def _entries(self) -> Iterator[tuple[int, int, bytes]]:
        """Sector, flags and data of each entry of the log."""
        with self._log.open("rb") as log:
            _, _, count, size = struct.unpack("<QQQI", log.read(28))
            log.seek(size)
            for _ in range(count):
                sector, sectors, flags, _ = struct.unpack_from("<QQQQ", log.read(size))
                # A discarded range may read as anything: QEMU writes down no data of it.
                yield sector, flags, b"" if flags & DISCARD else log.read(sectors * size)

    def _argv(self) -> list[str]:
        """The cut decides what is lost, so nothing has to be synced here."""
        options = [
            f"driver=file,node-name=base,filename={self._base},cache.no-flush=on",
            f"driver=file,node-name=log,filename={self._log},cache.no-flush=on",
            "driver=blklogwrites,node-name=logged,file=base,log=log,log-super-update-interval=1",
        ]
        export = f"fuse,id=disk,node-name=logged,mountpoint={self._disk},writable=on"
        words = [word for option in options for word in ("--blockdev", option)]
        return ["qemu-storage-daemon", *words, "--export", export]


def content_of(disk: Path, folder: Path) -> dict[str, bytes]:
    """What is in a folder of an ext4 that is not mounted, as the next mount would find it. The file stays as it is."""
    copy, target = disk.with_suffix(".copy"), disk.with_suffix(".files")
    _run("cp", "--sparse=always", str(disk), str(copy))
    _run("e2fsck", "-p", str(copy), allowed=(0, 1))  # replays the journal
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    _run("debugfs", "-R", f"rdump /{folder} {target}", str(copy))
    return files_in(target / folder.name)


def files_in(folder: Path) -> dict[str, bytes]:
    """Contents by name; hidden files, which a crash may leave, are left out."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _apply(disk: int, writes: list[tuple[int, bytes]]) -> None:
    for sector, data in writes:
        os.pwrite(disk, data, sector * SECTOR)


def _run(*argv: str, allowed: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode not in allowed:
        raise AssertionError(f"{' '.join(argv)}: {done.returncode}, {done.stdout}{done.stderr}")
