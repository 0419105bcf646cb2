"""A disk that says of some sectors that it cannot read them."""

from __future__ import annotations

import fcntl
import struct
from pathlib import Path

from testtools import TestCase

from drivers.host.command import run
from tests.patience import wait_until

_SETTINGS = Path("/sys/module/scsi_debug/parameters")
_DISK = "/sys/bus/pseudo/drivers/scsi_debug/adapter0/host*/target*/*/block/*"
_FIBMAP = 1
"""Linux: linux/fs.h."""
_BLOCK = 4096


class BadDisk:
    """A SCSI disk of 32 MiB in memory (the kernel's scsi_debug) with a mounted file system, ``folder``."""

    def __init__(self, case: TestCase, parent: Path) -> None:
        run(["modprobe", "scsi_debug", "dev_size_mb=32", "delay=0"])
        case.addCleanup(run, ["modprobe", "--remove", "scsi_debug"])
        case.addCleanup(run, ["udevadm", "settle"])
        wait_until(lambda: len(list(Path("/").glob(_DISK[1:]))) == 1)
        (disk,) = Path("/").glob(_DISK[1:])
        run(["udevadm", "settle"])
        run(["mke2fs", "-q", "-t", "ext4", "-b", str(_BLOCK), "-O", "^has_journal", f"/dev/{disk.name}"])
        self.folder = parent / "bad"
        self.folder.mkdir()
        run(["mount", f"/dev/{disk.name}", str(self.folder)])
        case.addCleanup(run, ["umount", str(self.folder)])

    def spoil(self, file: Path, offset: int) -> None:
        """Have a medium error in the block of a file that is at this offset in bytes."""
        with file.open("rb") as opened:
            (block,) = struct.unpack("i", fcntl.ioctl(opened, _FIBMAP, struct.pack("i", offset // _BLOCK)))
        for name, value in (("start", block * (_BLOCK // 512)), ("count", _BLOCK // 512)):
            (_SETTINGS / f"medium_error_{name}").write_text(str(value))
        (_SETTINGS / "opts").write_text("2")  # SDEBUG_OPT_MEDIUM_ERR
