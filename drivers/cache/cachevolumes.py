"""The volumes of the bcache driver: a file, a partition or a disk, each with a bcache cache set of its own.

A volume begins with a mark, which names the volume by a random number. What has another number in its mark, or no mark,
is not this volume, and is left alone. bcache's superblock lies 8 KiB behind the mark, where udev does not find
and register it. The map of a volume tells how the volume is::

    virtman-cachenew-NUMBER    it starts or stops, or a kill cut that off
    virtman-cachevol-NUMBER    it runs; without a set on the map, bcache has given the volume up
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import uuid
from collections.abc import Collection
from pathlib import Path

from drivers.errors import BadDisk, BadVolume, NoSpace
from drivers.host import blockdev, emptydisk
from drivers.host.command import run, tool
from drivers.host.space import Room, allocate
from drivers.kernel import bcachedev, devmapper, loopdev
from drivers.kernel.devmapper import SECTOR

SHIFT = 8192
"""Bytes before a superblock."""

SHARE = 4
"""A file takes one part in so many of what its file system has to spare, if that is less than it may take."""

SMALLEST, MANY = 16 << 10, 1 << 13
"""A volume that would have fewer buckets than MANY gets smaller ones, of SMALLEST bytes at least. bcache keeps one of
1,024 buckets free, and does not keep a read that finds none free (Linux: drivers/md/bcache/super.c, cache_alloc)."""

LIMIT = 5.0
"""Seconds for the mark of a volume to be read: a disk may have to spin up, or may never answer."""

_MAP, _HALF = "virtman-cachevol-", "virtman-cachenew-"
_MARK = "virtman cache volume "
_READ = 'for how in direct fullblock; do dd if="$1" iflag=$how bs=4096 count=1 status=none && break; done'
"""Reads the mark from the disk itself, where that is possible: memory would answer for a dead disk."""


class Volumes:
    """What is done to one volume, by its path and number. The caller holds the lock of the group.

    A file has all its disk space from the beginning, so that no cache takes the room that VMs need to write.
    """

    def __init__(self, *, file_size: int, bucket: int, room: Room, limit: float = LIMIT) -> None:
        """``file_size``: bytes that a file has at most; ``bucket``: see BUCKET of the driver; ``limit``: see LIMIT."""
        self._file_size, self._bucket, self._room, self._limit = file_size, bucket, room, limit
        self._readers: dict[Path, subprocess.Popen[bytes]] = {}
        """The last process that read the mark at a path. A read that hangs in the kernel outlives its kill."""

    def number(self, path: Path) -> str:
        """The number in a volume's mark; empty if there is no mark, or no answer within the limit.

        Raises ToolMissing, OSError.
        """
        before = self._readers.get(path)
        if before is not None and before.poll() is None:
            return ""  # a second reader would hang as well
        argv = [tool("sh"), "-c", _READ, "sh", str(path)]
        # In memory: where file systems are full a volume must be found, if only to be removed.
        with os.fdopen(os.memfd_create("mark"), "r+b") as begins, contextlib.suppress(subprocess.TimeoutExpired):
            reader = self._readers[path] = subprocess.Popen(argv, stdout=begins, stderr=subprocess.DEVNULL)
            reader.wait(self._limit)
            begins.seek(0)
            text = begins.read().rstrip(b"\0").decode(errors="replace")
            return text.removeprefix(_MARK) if text.startswith(_MARK) else ""
        return ""

    def check_mark(self, path: Path, number: str) -> None:
        """Raises BadVolume if a path does not lead to the volume, or the volume does not answer."""
        if self.number(path) != number:
            raise BadVolume(path, "what was made there is missing, or does not answer")

    def make(self, path: Path, known: Collection[str] = ()) -> str:
        """Make a new volume. Returns its number. ``known``: numbers of the other volumes.

        Raises BadVolume, and nothing has changed, if anything of somebody else is there; NoSpace, CommandFailed.
        """
        number = uuid.uuid4().hex[:16]
        try:
            if why := self._objection(path, known):
                raise BadVolume(path, why)
            file = path if path.exists() else self._new_file(path)
            self.format(file, number)
            if file != path:
                file.rename(path)
        except OSError as error:
            raise BadVolume(path, error.strerror or str(error)) from error
        return number

    def _new_file(self, path: Path) -> Path:
        """A file of a volume's size, which gets its name later: a kill leaves no file without a mark at the path."""
        spare = self._room.spare(path.parent)
        size = min(self._file_size, max(SMALLEST << 10, spare // SHARE))
        if size > spare:
            raise NoSpace(path, spare, size, "free beside the reserve for VMs (virtman agent --reserve)")
        fresh = path.with_name(f".{path.name}.new")
        fresh.unlink(missing_ok=True)
        allocate(fresh, SHIFT + size)
        return fresh

    def start(self, path: Path, number: str) -> None:
        """Have the volume run, unless bcache has given it up.

        Raises BadVolume as ``check_mark``; BadDisk if bcache refuses the volume; NotReleased, CommandFailed, OSError.
        """
        name, half = _MAP + number, _HALF + number
        if devmapper.exists(name):
            return
        self.check_mark(path, number)
        if devmapper.exists(half) and not attached(number):
            self.stop(path, number)  # its set may be about to stop
        device = path if path.is_block_device() else loopdev.attach(path)
        devmapper.create(half, [f"0 {(size_of(path) - SHIFT) // SECTOR} linear {device} {SHIFT // SECTOR}"])
        bcachedev.register(half)
        home = bcachedev.running_set(half)
        if home is None:
            raise BadDisk(f"bcache does not run the cache volume {path}")
        bcachedev.begin_young(home)
        for threshold in ("congested_read_threshold_us", "congested_write_threshold_us"):
            (home / threshold).write_text("0")
        devmapper.rename(half, name)

    def stop(self, path: Path, number: str) -> None:
        """Release the volume, to which nothing is attached. Raises NotReleased, CommandFailed; can be called again."""
        name, half = _MAP + number, _HALF + number
        if devmapper.exists(name):
            devmapper.rename(name, half)  # one that a kill leaves without a set must not look as if bcache gave it up
        bcachedev.stop(half)
        devmapper.remove(half)
        loopdev.detach(path)

    def erase(self, path: Path, number: str) -> bool:
        """Delete the file of a stopped volume, or the mark on its device. False if it does not answer, or refuses."""
        with contextlib.suppress(OSError):
            if self.number(path) == number:
                path.unlink() if path.is_file() else emptydisk.write(path, bytes(emptydisk.BEGINNING))
                return True
        return False

    def format(self, path: Path, number: str) -> None:
        """Write the mark, and then an empty cache of the volume's size. Raises CommandFailed, ToolMissing, OSError."""
        size, bucket = size_of(path) - SHIFT, self._bucket
        while bucket > SMALLEST and size // bucket < MANY:
            bucket //= 2
        with os.fdopen(os.memfd_create("superblock"), "r+b") as file:  # the tool knows no offset
            file.truncate(size)
            options = ["--bucket", str(bucket), "--block", str(SECTOR)]
            run(["make-bcache", "-C", *options, f"/proc/{os.getpid()}/fd/{file.fileno()}"])
            superblock = file.read(bcachedev.SUPERBLOCK)
        emptydisk.write(path, f"{_MARK}{number}".encode().ljust(SHIFT, b"\0"), superblock)

    def _objection(self, path: Path, known: Collection[str]) -> str:
        """Why a volume must not be made there; empty if it can be. Raises OSError, CommandFailed."""
        if not path.is_absolute():
            return "it must be an absolute path"
        if not path.exists():
            return "" if path.parent.is_dir() else "there is no such file or device, nor a folder to make a file in"
        if not path.is_block_device() and not path.is_file():
            return "it is neither a file nor a disk"
        number = self.number(path)
        if number and number in known:
            return f"it is the volume {number} already, by another path"
        if path.is_block_device():
            return self._objection_to_device(path, marked=bool(number))
        unmarked = "" if number else "the file holds something else; name one that does not exist"
        return "it is in use" if loopdev.device_of(path) else unmarked

    def _objection_to_device(self, path: Path, *, marked: bool) -> str:
        if why := emptydisk.objection(path, marked=marked):
            return why
        sector = int(run(["blockdev", "--getss", str(path)]).stdout)
        if sector != SECTOR:
            return f"its sectors are not of {SECTOR} bytes; name a file on a file system there"
        if (size := size_of(path)) < (needed := SHIFT + (self._bucket << 10)):
            return f"it is too small: {size} bytes, {needed} needed"
        return ""


def running(number: str) -> Path | None:
    """The set of a volume that runs."""
    return bcachedev.running_set(_MAP + number) if devmapper.exists(_MAP + number) else None


def failed(number: str) -> bool:
    """Whether bcache has given the volume up."""
    return devmapper.exists(_MAP + number) and running(number) is None


def attached(number: str) -> list[str]:
    """What is attached to a volume, also to one that does not stop. Raises OSError."""
    name = _MAP + number if devmapper.exists(_MAP + number) else _HALF + number
    home = bcachedev.running_set(name) if devmapper.exists(name) else None
    return bcachedev.attached(home) if home else []


def size_of(path: Path) -> int:
    """Bytes of a file or device. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return blockdev.size(file.fileno())
