"""The volumes of the bcache driver: files and disks that hold what was read, each a bcache cache set of its own.

A volume begins with a mark, which names it by a random number; bcache's superblock lies 8 KiB behind, where udev does
not find and register it. ``volumes.json`` in the state folder maps the paths of the volumes to their numbers, and a
path that leads to something else after a reboot is left alone. While images are open a map of each volume is there::

    virtman-cachenew-NUMBER    a start was cut short
    virtman-cachevol-NUMBER    it runs; without a set on it, bcache has given it up: it has failed
"""

from __future__ import annotations

import json
import logging
import os
import stat
import uuid
from pathlib import Path

from drivers.base import VolumeState
from drivers.cache.cachefiles import file_bytes
from drivers.errors import BadDisk, BadVolume, DriverError, NoSpace
from drivers.host.beginnings import Beginnings
from drivers.host.command import run
from drivers.host.durable import write_atomically
from drivers.host.space import Room, allocate
from drivers.kernel import bcachedev, devmapper, loopdev

log = logging.getLogger(__name__)

SHIFT = 8192
"""Bytes before a superblock."""

SHARE = 4
"""A file takes one part in so many of what its file system has to spare, if that is less than it may take."""

SMALLEST, MANY = 16 << 10, 1 << 13
"""A volume that would have fewer buckets than MANY gets smaller ones, of SMALLEST bytes at least. bcache keeps one of
1,024 buckets free, and does not keep a read that finds none free (Linux: drivers/md/bcache/super.c, cache_alloc)."""

_MARK = "virtman cache volume "
_LOOKED_AT = 1 << 20
"""Bytes at the start of a device that must be empty if it has no mark."""
_SECTOR = devmapper.SECTOR


class Volumes:
    """The volumes in ``folder/volumes.json``. Until others are named there is one: the file ``folder/pool``.

    A file has all its disk space from the beginning, so that no cache takes the room that VMs need to write.
    """

    def __init__(
        self, folder: Path, *, file_size: int, bucket: int, room: Room | None = None,
        beginnings: Beginnings | None = None,
    ) -> None:  # fmt: skip
        """``file_size``: bytes that a file has at most; ``bucket``: see BUCKET of the driver.

        ``room``: what a file may take of its file system; ``beginnings``: of what volumes lie on. The usual ones unless
        given.
        """
        self._folder, self._record = folder, folder / "volumes.json"
        self._file_size, self._bucket = file_size, bucket
        self._room = room or Room(folder.parent)
        self.default = folder / "pool"
        self.replacement = bcachedev.Replacement()
        self._beginnings = beginnings or Beginnings()
        self._known: tuple[tuple[int, int, int], dict[Path, str]] | None = None
        """What the record said, with what its file was just before: it is asked for with each look at an image."""
        self.stopping: dict[str, bool] = {}
        """Numbers of the volumes that were not released yet when they were to stop, and whether they begin empty."""
        self.no_room = ""
        """Why there is no first volume, if so."""

    def recorded(self) -> dict[Path, str]:
        """The numbers of the volumes; none while there is no room for the first one, which is looked for again."""
        try:
            return dict(self._read())
        except FileNotFoundError:
            pass
        except (ValueError, AttributeError) as error:
            log.error("%s is damaged, and the cache begins anew in %s: %s", self._record, self.default, error)
        try:
            return self.record({self.default: self._number(self.default) or self._make(self.default)})
        except NoSpace as error:
            self.no_room = f"{error}, beside what is kept for what VMs write (virtman agent --reserve)"
            return {}

    def _read(self) -> dict[Path, str]:
        """Raises OSError; ValueError, AttributeError if it is damaged."""
        found = self._record.stat()
        stamp, known = (found.st_ino, found.st_mtime_ns, found.st_size), self._known
        if known is None or known[0] != stamp:
            told = json.loads(self._record.read_text())
            known = self._known = stamp, {Path(path): str(number) for path, number in told.items()}
        return known[1]

    def file_bytes(self) -> int:
        """Disk space that the volumes in files take; 0 while none is recorded. Without the lock of the group.

        Raises OSError.
        """
        try:
            return sum(file_bytes(path) for path in self._read() if path.is_file())
        except (FileNotFoundError, ValueError, AttributeError):
            return 0

    def record(self, volumes: dict[Path, str]) -> dict[Path, str]:
        """Write down which volumes there are."""
        self.no_room = ""
        write_atomically(self._record, json.dumps({str(path): number for path, number in volumes.items()}).encode())
        return volumes

    def make(self, path: Path) -> str:
        """A new volume, not recorded yet. Returns its number.

        Raises BadVolume if there is anything of somebody else; NoSpace, CommandFailed.
        """
        if not path.is_absolute():
            raise BadVolume(path, "it must be an absolute path")
        try:
            self._check(path)
            return self._make(path)
        except OSError as error:
            raise BadVolume(path, error.strerror or str(error)) from error

    def start(self, path: Path, number: str) -> None:
        """Have the volume run, unless it has failed. If it is damaged it starts empty. Raises DriverError, OSError."""
        if number in self.stopping:
            self.stop(path, number)
        name, half = _map(number), _half(number)
        if devmapper.exists(name):
            return
        if path == self.default and not path.exists():
            self._make(path, number)
        self._check_mark(path, number)
        self._create(half, path)
        bcachedev.prefer_unused(half)
        try:
            bcachedev.register(half)
        except BadDisk as error:
            log.warning("the cache volume %s is thrown away: %s", path, error)
            devmapper.remove(half)
            self._write(path, number)
            self._create(half, path)
            bcachedev.register(half)
        home = bcachedev.running_set(half)
        if home is None:
            raise BadDisk(f"bcache does not run the cache volume {path}")
        for threshold in ("congested_read_threshold_us", "congested_write_threshold_us"):
            (home / threshold).write_text("0")
        devmapper.rename(half, name)
        self.replacement.begin(home)

    def stop(self, path: Path, number: str, *, empty: bool = False) -> None:
        """Release the volume, to which no image is attached. What a failed one holds is not trusted any more.

        ``empty``: throw away what it holds. Raises NotReleased, CommandFailed; the next start or stop goes on with it.
        """
        empty = self.stopping.setdefault(number, empty or self.failed(number))
        for name in (_map(number), _half(number)):
            bcachedev.stop(name)
            devmapper.remove(name)
        del self.stopping[number]
        if empty and self._number(path) == number:
            try:
                self._write(path, number)
            except (DriverError, OSError) as error:
                log.warning("the cache volume %s is not emptied: %s", path, error)
        loopdev.detach(path)

    def check(self, path: Path, number: str) -> None:
        """Whether a volume could be emptied.

        It takes a file in the state folder for a moment. Raises BadVolume if it is not there; CommandFailed,
        ToolMissing, OSError.
        """
        self._check_mark(path, number)
        self._superblock(size_of(path) - SHIFT)

    def _check_mark(self, path: Path, number: str) -> None:
        if self._number(path) != number:
            raise BadVolume(path, "what was made there is missing, or does not answer")

    def _superblock(self, size: int) -> bytes:
        """What the tool writes to a device. It knows no offset, so that it writes to a file."""
        bucket = self._bucket
        while bucket > SMALLEST and size // bucket < MANY:
            bucket //= 2
        options = ["--bucket", str(bucket), "--block", str(_SECTOR)]
        file = self._folder / "superblock.new"
        try:
            with file.open("wb") as opened:
                opened.truncate(size)
            run(["make-bcache", "-C", *options, str(file)])
            with file.open("rb") as opened:
                return opened.read(bcachedev.SUPERBLOCK)
        finally:
            file.unlink(missing_ok=True)

    def erase(self, path: Path, number: str) -> bool:
        """Give a stopped volume back: a file is deleted, a device loses its mark. Raises OSError.

        False, and nothing is changed, if it is not there, or does not answer.
        """
        if self._number(path) != number:
            return False
        if path.is_file():
            path.unlink()
        else:
            with path.open("r+b", buffering=0) as file:
                file.write(bytes(_LOOKED_AT))  # all that is looked at when it is added again
                os.fsync(file.fileno())
        return True

    def running(self, number: str) -> Path | None:
        """The set of a volume that runs, and is not about to stop."""
        return None if number in self.stopping else self.home(number)

    def home(self, number: str) -> Path | None:
        """The set of a volume, also of one that is to stop: it runs on if the kernel could not be told so."""
        name = _map(number)
        return bcachedev.running_set(name) if devmapper.exists(name) else None

    def failed(self, number: str) -> bool:
        """Whether bcache has given the volume up."""
        name = _map(number)
        return number not in self.stopping and devmapper.exists(name) and bcachedev.running_set(name) is None

    def unused_state(self, path: Path, number: str) -> VolumeState:
        """How a volume is that the kernel does not have."""
        return VolumeState.IDLE if self._number(path) == number else VolumeState.MISSING

    def _number(self, path: Path) -> str | None:
        """The number in a volume's mark; None if there is none, or what holds it cannot be read, or does not answer."""
        begins = (self._beginnings.of(path) or "").rstrip("\0")
        return begins.removeprefix(_MARK) if begins.startswith(_MARK) else None

    def _check(self, path: Path) -> None:
        """Raises BadVolume, OSError if the volume cannot be made without harm."""
        if not path.exists():
            if not path.parent.is_dir():
                raise BadVolume(path, "there is no such file or device, nor a folder to make a file in")
            return
        mode = path.stat().st_mode
        if stat.S_ISBLK(mode):
            self._check_device(path)
        elif not stat.S_ISREG(mode):
            raise BadVolume(path, "it is neither a file nor a disk")
        elif loopdev.device_of(path):
            raise BadVolume(path, "it is in use")
        elif self._number(path) is None:
            raise BadVolume(path, "the file holds something else; name one that does not exist")
        if (other := self._number(path)) in self.recorded().values():
            raise BadVolume(path, f"it is the volume {other} already, by another path")

    def _check_device(self, path: Path) -> None:
        # Exclusively: that fails for what is mounted, or is a part of something (open(2), O_EXCL).
        try:
            os.close(os.open(path, os.O_RDWR | os.O_EXCL))
        except OSError as error:
            raise BadVolume(path, f"it is mounted or in use: {error.strerror}") from error
        if int(run(["blockdev", "--getss", str(path)]).stdout) != _SECTOR:
            raise BadVolume(path, f"its sectors are not of {_SECTOR} bytes; name a file on a file system there")
        needed = self._bucket << 10
        if size_of(path) < needed + SHIFT:
            raise BadVolume(path, f"it is too small: {size_of(path)} bytes, {needed + SHIFT} needed")
        said = run(["wipefs", "--no-act", "--json", str(path)]).stdout
        if said.strip() and (found := json.loads(said)["signatures"]):
            kinds = ", ".join(sorted({str(row["type"]) for row in found}))
            raise BadVolume(path, f"it holds {kinds}; wipefs --all makes it free if nobody needs that")
        if self._number(path) is None:
            with path.open("rb", buffering=0) as file:
                if any(file.read(_LOOKED_AT)):
                    raise BadVolume(path, "it holds something unknown; make its first MiB zeros if nobody needs that")

    def _make(self, path: Path, number: str = "") -> str:
        """A volume with a mark and a superblock, instead of one that was checked. Raises NoSpace, OSError."""
        number = number or uuid.uuid4().hex[:16]
        if path.is_block_device():
            self._write(path, number)
            return number
        spare, least = self._room.spare(path.parent), SMALLEST << 10
        size = min(self._file_size, max(least, spare // SHARE))
        if size > spare:
            raise NoSpace(path, spare, size)
        path.unlink(missing_ok=True)
        path.touch(0o600, exist_ok=False)
        allocate(path, SHIFT + size)
        self._write(path, number)
        return number

    def _write(self, path: Path, number: str) -> None:
        """The mark, then an empty cache of the size that is there."""
        superblock = self._superblock(size_of(path) - SHIFT)
        with path.open("r+b", buffering=0) as file:
            file.write(_mark(number))
            os.fsync(file.fileno())
            file.write(superblock)
            os.fsync(file.fileno())

    def _create(self, name: str, path: Path) -> None:
        device = path if path.is_block_device() else loopdev.attach(path)
        sectors = (size_of(path) - SHIFT) // _SECTOR
        devmapper.create(name, [f"0 {sectors} linear {device} {SHIFT // _SECTOR}"])


def size_of(path: Path) -> int:
    """Bytes of a file or device, 0 if there is none."""
    try:
        with path.open("rb", buffering=0) as file:
            return file.seek(0, os.SEEK_END)
    except OSError:
        return 0


def _map(number: str) -> str:
    return f"virtman-cachevol-{number}"


def _half(number: str) -> str:
    return f"virtman-cachenew-{number}"


def _mark(number: str) -> bytes:
    return f"{_MARK}{number}".encode().ljust(SHIFT, b"\0")
