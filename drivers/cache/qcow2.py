"""Keep what was read from the parents in a sparse qcow2 file, by QEMU's copy-on-read.

The file belongs to the image's digest. Its header has no backing name: the parents are the node it is opened over.
Which ranges it holds is in its own tables, and a range of zeros that was read is held like any other.

The storage daemon never waits for the disk: QEMU would flush three times for each table that it adds, while a VM waits
for its read. A note beside the file says in which boot of the host it was opened, and ``close`` removes it when the
file is safely on the disk. So a file with a note of an earlier boot was cut off by a power cut, and is not used.

A read that cannot be kept, because the file may not grow (drivers/qemu/growth.py), is answered all the same.

The daemon reads and writes the file by io_uring where that works: a warm read costs half the processor time then.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import struct
from pathlib import Path

from drivers.base import CacheStats, Device, Image, Place
from drivers.cache.cachefiles import checked_key, file_bytes, file_of, key_of
from drivers.door import door
from drivers.errors import (
    BadDevice,
    BadDisk,
    CommandFailed,
    CommandTimedOut,
    DriverError,
    InUse,
    NoSpace,
    NotServing,
    ProtocolViolated,
)
from drivers.host.command import run
from drivers.host.durable import sync
from drivers.host.folders import matching
from drivers.names import checked
from drivers.nbd.endpoints import CACHE_NODE, cache_export
from drivers.nbd.probe import ALLOCATION_DEPTH, Client
from drivers.needs import QEMU_IMG, Needs
from drivers.qemu import uring
from drivers.qemu.qcow2file import Header, read_header

log = logging.getLogger(__name__)

CLUSTER_SIZE = 8 << 10
"""Bytes that are fetched and kept at once, at least.

A Debian guest's boot reads 44.2 MB in 1179 reads. What a host fetched for it, and the seconds to replay it cold through
3 hosts (QEMU 7.2, 2 cores, median of 6): 4 KiB 1.000 times and 1.1 s, 8 KiB 1.017 and 0.87 s, 16 KiB 1.044 and 0.74 s,
64 KiB 1.182 and 0.61 s. The boot itself takes 13 s. Warm replays take the same time with any size.
"""

_ROOM = 1 << 20
"""Bytes that must be free for an empty cache file: it takes 24 KiB, and 1 MiB more for each TiB of the image."""

_PARENT_NODE = "parent"
_HELD_HERE = 1
_STATS_TIMEOUT = 2.0
_CHECK_TIMEOUT = 600.0
_SECTOR = 512
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# QEMU locks single bytes of an open image from 100 on (block/file-posix.c, RAW_LOCK_PERM_BASE, RAW_LOCK_SHARED_BASE).
_LOCKS_FROM, _LOCKS_LENGTH = 100, 200
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of fcntl(2) on 64-bit Linux
_F_OFD_GETLK = 36

_CHECK_FOUND_LEAKS = 3  # qemu-img(1), check


@door
class Qcow2Cache:
    """Cache files in ``<state>/cache``. Without ``io_uring`` it is not even tried."""

    needs = Needs(tools=(QEMU_IMG,))

    def __init__(self, place: Place, *, io_uring: bool = True) -> None:
        self._folder = place.state / "cache"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sockets = place.run / "serve"
        self._io_uring = io_uring

    def open(self, image: Image, base: Device) -> Device:
        """A device over ``base`` that keeps what it reads. A cache file that is not beyond doubt is thrown away first.

        While a storage daemon has the file open nothing is checked or changed.

        Raises BadDevice, BadDisk if the image's size is no multiple of 512, NoSpace, CommandFailed.
        """
        if base.node is None:
            raise BadDevice(f"image {image.name}: what is below the cache has no QEMU block node")
        if image.size % _SECTOR:
            raise BadDisk(f"image {image.name}: its size {image.size} is not a multiple of {_SECTOR}")
        path = self._path(image)
        if not _in_use(path):
            doubt = self._doubt(image, path)
            if doubt:
                log.warning("image %s: cache %s is thrown away: %s", image.name, path, doubt)
                path.unlink()
            self._prepare(image, path)
        aio = "io_uring" if self._io_uring and uring.usable() else "threads"
        return Device(size=image.size, node=_node(path, base, aio))

    def close(self, image: Image) -> None:
        """Make what was kept outlive a power cut. Nothing to do while a storage daemon still has the file open."""
        path, note = self._path(image), self._note(image)
        if note.exists() and path.exists() and not _in_use(path):
            sync(path)
            note.unlink()
            sync(self._folder)

    def remove(self, key: str) -> int:
        """Delete the files of an image's key. Returns the bytes of disk space freed. Raises InUse."""
        files = list(matching(self._folder, f"{checked_key(key)}-*"))
        for path in files:
            if _in_use(path):
                raise InUse(path)
        freed = self.size(key)
        for path in files:
            path.unlink(missing_ok=True)
        return freed

    def size(self, key: str) -> int:
        """The bytes of disk space that ``remove`` would free."""
        return sum(file_bytes(path) for path in matching(self._folder, f"{checked_key(key)}-*.qcow2"))

    def stats(self, image: Image) -> CacheStats:
        """Exactly what the cache holds now; asks the storage daemon, if one has the file open.

        The daemon is also made to write down its tables, so that what was fetched until now is not fetched again if the
        daemon is killed. Raises NotServing when the daemon does not answer, CommandFailed.
        """
        path = self._path(image)
        held = self._served_bytes(image) if _in_use(path) else self._resting_bytes(path)
        return CacheStats(held_bytes=held, file_bytes=file_bytes(path))

    def existing(self) -> frozenset[str]:
        """Keys of the images with a file, whole or half made."""
        return frozenset(key_of(path) for path in self._folder.iterdir())

    def _path(self, image: Image) -> Path:
        return file_of(self._folder, image, "qcow2")

    def _fresh(self, image: Image) -> Path:
        return file_of(self._folder, image, "new")

    def _note(self, image: Image) -> Path:
        return file_of(self._folder, image, "json")

    def _prepare(self, image: Image, path: Path) -> None:
        """Make the file if there is none, and note that it is opened; after a failure all is as it was."""
        new = not path.exists()
        try:
            if new:
                self._create(image, path)
            self._note_opening(image)
        except (DriverError, OSError):
            self._fresh(image).unlink(missing_ok=True)
            if new:
                path.unlink(missing_ok=True)
            raise

    def _create(self, image: Image, path: Path) -> None:
        free = shutil.disk_usage(self._folder).free
        if free < _ROOM:
            raise NoSpace(path, free, _ROOM)
        fresh = self._fresh(image)
        # Lazy refcounts set the header's dirty bit while the file is in use; closing it clears the bit.
        options = f"cluster_size={CLUSTER_SIZE},lazy_refcounts=on"
        run(["qemu-img", "create", "-q", "-f", "qcow2", "-o", options, str(fresh), str(image.size)])
        fresh.rename(path)

    def _note_opening(self, image: Image) -> None:
        """Write down in which boot of the host the file is opened, on the disk before the first change of the file."""
        fresh = self._fresh(image)
        fresh.write_text(json.dumps({"image": image.name, "boot_id": _boot_id()}))
        sync(fresh)
        fresh.rename(self._note(image))
        sync(self._folder)

    def _safe(self, image: Image) -> bool:
        """Whether the file was closed, or opened since the host came up."""
        try:
            note = json.loads(self._note(image).read_text())
        except FileNotFoundError:
            return True
        except ValueError:
            return False
        return isinstance(note, dict) and note.get("boot_id") == _boot_id()

    def _doubt(self, image: Image, path: Path) -> str | None:
        """Why the file must not be used, if so.

        A file that a killed daemon left is repaired if the host has not gone down since: the kernel kept the order of
        its writes. After a power cut, tables may have reached the disk and the data they tell of not.
        """
        try:
            header = read_header(path)
        except FileNotFoundError:
            return None
        except BadDisk as error:
            return str(error)
        if not self._safe(image):
            return "it was open when the host went down"
        return _misfit(header, image) or _damage(path, repair=header.dirty)

    def _served_bytes(self, image: Image) -> int:
        socket = self._sockets / f"{checked(image.name)}.sock"
        name = cache_export(image.name)
        try:
            with Client(socket, name, timeout=_STATS_TIMEOUT, context=ALLOCATION_DEPTH) as client:
                held = sum(extent.length for extent in client.extents() if extent.value == _HELD_HERE)
                client.flush()
        except ProtocolViolated as error:
            raise NotServing(f"the cache of image {image.name} is not served: {error}") from error
        return held

    def _resting_bytes(self, path: Path) -> int:
        if not path.exists():
            return 0
        output = run(["qemu-img", "map", "-U", "--output=json", "-f", "qcow2", str(path)]).stdout
        return sum(extent["length"] for extent in json.loads(output) if extent["present"])


def _node(path: Path, base: Device, aio: str) -> dict[str, object]:
    """Copy-on-read into the file, and the parents directly for a read where that fails.

    QEMU makes a failed write of copy-on-read an error of the read (block/io.c, bdrv_co_do_copy_on_readv). The quorum
    reads from its first child that does not fail.
    """
    cache = {
        "driver": "qcow2",
        "node-name": CACHE_NODE,
        "read-only": False,
        "cache": {"no-flush": True},
        "file": {"driver": "file", "filename": str(path), "aio": aio},
        "backing": {**(base.node or {}), "node-name": _PARENT_NODE},
    }
    return {
        "driver": "quorum",
        "read-only": True,
        "read-pattern": "fifo",
        "vote-threshold": 1,
        "children": [{"driver": "copy-on-read", "read-only": False, "file": cache}, _PARENT_NODE],
    }


def _misfit(header: Header, image: Image) -> str | None:
    if header.size != image.size:
        return f"it is for {header.size} bytes, not {image.size}"
    if header.backing is not None or header.external_data:
        return "it refers to another file"
    if header.corrupt:
        return "QEMU has found it damaged"
    return None


def _damage(path: Path, *, repair: bool) -> str | None:
    """What is wrong with a file after its repair; leaked clusters are not wrong."""
    try:
        run(["qemu-img", "check", "-q", "-f", "qcow2", *(["-r", "all"] if repair else []), str(path)],
            timeout=_CHECK_TIMEOUT)  # fmt: skip
    except CommandFailed as error:
        if error.code == _CHECK_FOUND_LEAKS:
            return None
        return error.stderr.strip().split("\n")[0] or str(error)
    except CommandTimedOut as error:
        return str(error)
    return None


def _in_use(path: Path) -> bool:
    """Whether a QEMU has the file open for writing."""
    try:
        with path.open("rb") as file:
            wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _LOCKS_FROM, _LOCKS_LENGTH, 0)
            found = _FLOCK.unpack(fcntl.fcntl(file, _F_OFD_GETLK, wanted))
    except FileNotFoundError:
        return False
    return bool(found[0] != fcntl.F_UNLCK)


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
