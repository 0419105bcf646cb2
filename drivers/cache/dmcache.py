"""Keep what was read from the parents in dm-cache, one cache for each image in files of ``<state>/cache``.

dm-cache copies a block into the cache only after it was read again and again (policy smq), and reads it once more for
the copy. Two things make one fetch of it. All reads below dm-cache go through pages in memory (onefetch.py), so
that later reads and the copy find there what the first read fetched. And every few seconds, and when the image is
closed, the driver reads the blocks that are in that memory until dm-cache has copied them, and then frees the memory::

    virtman-cache-NAME-KEY (read-only mirror) -> virtman-cachein-NAME-KEY (dm-cache) -> loop devices of two files
                              |                             |
                              └---- when that fails --------┴-> virtman-cacheonce-NAME-KEY -> parents

The first map goes over to the parents when the cache fails, be it one bad sector: in the kernel, without an error.

dm-cache does not wait for the copy to be on the disk before it writes down where it is, so after a power cut it might
serve what is not there. A note tells in which boot of the machine the cache is open: of another, it starts empty. So it
does if its metadata could not be written when it was closed: dm-cache would write all blocks to the parents.

The first map is a mirror, not a multipath map as above bcache: a bad sector of a disk is no error of a path to it
(Linux: linux/blk_types.h, blk_path_error), so the VM would get the error. After it the image is read from the parents
until it is closed and opened. A cache whose files cannot be written is read on, and filled less and less often.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from drivers.base import CacheStats, Device, Image, Place
from drivers.cache import onefetch
from drivers.cache.cachefiles import Files, file_bytes, kernel_base, label, undone_after_error
from drivers.door import door
from drivers.errors import CommandFailed
from drivers.host.blockdev import BOOT_ID
from drivers.host.descriptors import opened
from drivers.host.durable import sync, write_atomically
from drivers.host.retry import Backoff
from drivers.host.space import allocate
from drivers.kernel import devmapper, loopdev, multipath, ownership
from drivers.needs import DEVICE_MAPPER, DMSETUP, LOOP, LOSETUP, MODPROBE, UDEVADM, Needs

log = logging.getLogger(__name__)

BLOCK = 64 << 10
"""Bytes of a block: what is fetched, whole, when any of it is read; the kernel allows multiples of 32 KiB."""

META_BYTES = 4 << 20
META_BYTES_A_BLOCK = 16
"""The kernel's document asks for 4 MiB and 16 bytes for each block (admin-guide/device-mapper/cache)."""

_KINDS = ("open", "meta", "data")
_SECTOR = devmapper.SECTOR
_PAGE = mmap.PAGESIZE
_LOOKED_AT = 64 << 20
"""Bytes of an image for whose pages the kernel is asked at a time. What is mapped for it counts as memory that may be
wanted: it refuses more than there is (Linux: mm/overcommit-accounting)."""
_FLAGS, _CLEAN_SHUTDOWN = 4, (1).to_bytes(4, "little")
"""Where the metadata has its flags, and the one that stands alone in good order."""
_PASSES = 4
_BURST = 24
"""How often a block is read in a row. smq has 64 levels. As its statistics go, a read climbs 4, 2 or 1 of them, and a
block is copied at level 48, 32 or 0. Every second it puts the levels in order again, so reads far apart do not add up
(Linux: drivers/md/dm-cache-policy-smq.c)."""
_HEARTBEAT = 1.0
_CLOSING = 60.0
"""Seconds that may be spent on moving blocks into the cache."""
_PATIENCE = 3
_FIRST_PAUSE, _LAST_PAUSE = 2.0, 60.0
"""Seconds until it is tried again, once so many heartbeats in a row moved nothing."""


@door
class DmCache:
    """Files, maps and loop devices of each image are its own; images share nothing."""

    needs = Needs(
        tools=(DMSETUP, LOSETUP, MODPROBE, UDEVADM),
        modules=("dm_cache", "dm_cache_smq", *onefetch.MODULES, "dm_mirror", "dm_zero"),
        nodes=(DEVICE_MAPPER, LOOP),
        root=True,
    )

    def __init__(self, place: Place) -> None:
        ownership.claim(place.state)
        self._folder = place.state / "cache"
        self._files = Files(self._folder, *_KINDS)
        self._moves: dict[str, _Moves] = {}
        """By label."""

    def open(self, image: Image, base: Device) -> Device:
        """A read-only disk over ``base`` that keeps what it reads. A damaged cache starts empty.

        Raises BadDevice, BadDisk if the image's size is no multiple of 512, NoSpace, CommandFailed.
        """
        source, top = kernel_base(image, base), _top(image)
        if not devmapper.exists(top):
            with undone_after_error(image, self.close):
                self._start(image, source)
        return Device(size=image.size, path=devmapper.map_path(top))

    def close(self, image: Image) -> None:
        """Move what was fetched into the cache and remove all but its files.

        Raises CommandFailed if a program reads from the disk.
        """
        devmapper.remove(_top(image))
        self._settle(image, _CLOSING)
        self._moves.pop(label(image), None)
        self._stop_cache(image)
        onefetch.stop(label(image))
        note = self._files.of(image, "open")
        if note.exists():
            for file in (self._files.of(image, "data"), self._files.of(image, "meta")):
                if file.exists():
                    sync(file)
            note.unlink()
            sync(self._folder)

    def remove(self, key: str) -> int:
        """Delete what is kept of an image. Returns the bytes of disk space freed. Raises InUse if the image is open."""
        return self._files.remove(key)

    def size(self, key: str) -> int:
        """The bytes of disk space that ``remove`` would free."""
        return self._files.size(key)

    def stats(self, image: Image) -> CacheStats:
        """``held_bytes``: whole blocks, as far as they are in the cache's file.

        Moves what was fetched since into the cache, for at most a second at a time.
        """
        self._settle(image, _HEARTBEAT)
        data = file_bytes(self._files.of(image, "data"))
        return CacheStats(held_bytes=min(data, image.size), file_bytes=data + file_bytes(self._files.of(image, "meta")))

    def existing(self) -> frozenset[str]:
        """Keys of the images with a file, whole or half made."""
        return self._files.keys()

    def _start(self, image: Image, base: Path) -> None:
        inner, origin = _inner(image), _start_origin(image, base)
        if not devmapper.exists(inner.name):
            self._check_files(image)
            try:
                self._start_cache(image, origin)
            except CommandFailed as error:
                log.warning("image %s: its cache starts empty: %s", image.name, error)
                self._stop_cache(image)
                self._forget(image)
                self._start_cache(image, origin)
        devmapper.create(_top(image), [devmapper.failing_over(inner, origin, image.size // _SECTOR)], read_only=True)

    def _start_cache(self, image: Image, origin: Path) -> None:
        blocks, block = _blocks(image), BLOCK // _SECTOR
        allocate(self._files.of(image, "meta"), META_BYTES + META_BYTES_A_BLOCK * blocks)
        with self._files.of(image, "data").open("ab") as file:
            file.truncate(blocks * BLOCK)
        note = self._files.of(image, "open")
        write_atomically(note, BOOT_ID.read_bytes())
        meta, data = (loopdev.attach(self._files.of(image, kind)) for kind in ("meta", "data"))
        line = f"0 {blocks * block} cache {meta} {data} {origin} {block} 2 metadata2 writethrough smq 0"
        devmapper.create(_inner(image).name, [line])

    def _stop_cache(self, image: Image) -> None:
        devmapper.remove(_inner(image).name)
        for kind in ("meta", "data"):
            loopdev.detach(self._files.of(image, kind))

    def _check_files(self, image: Image) -> None:
        """Start empty if the machine went down while the cache was open, or if half of it is lost."""
        note, meta, data = (self._files.of(image, kind) for kind in _KINDS)
        if note.exists() and note.read_text() != BOOT_ID.read_text():
            log.warning("image %s: its cache starts empty: the machine went down while it was open", image.name)
            self._forget(image)
        if not (meta.exists() and data.exists() and data.stat().st_size == _blocks(image) * BLOCK):
            self._forget(image)
        elif not _closed_whole(meta):
            log.warning("image %s: its cache starts empty: its metadata is not whole", image.name)
            self._forget(image)

    def _settle(self, image: Image, seconds: float) -> None:
        """Have dm-cache copy the blocks that are in memory below it, and drop them there."""
        if not all(devmapper.exists(path.name) for path in (_inner(image), onefetch.device(label(image)))):
            return
        once = onefetch.device(label(image)).name
        multipath.reinstate(once, multipath.state(once).failed)
        moves, fetched = self._moves.setdefault(label(image), _Moves()), onefetch.fetched(label(image))
        if moves.done_at == fetched or (seconds < _CLOSING and time.monotonic() < moves.backoff.due):
            return
        if _is_passed_by(image):
            if not moves.passed_by:
                log.warning("image %s: a read of its cache failed: reads pass it by until the next opening", image.name)
            moves.passed_by = True
            return
        try:
            moved, left = _move(image, seconds) if _takes_blocks(image) else (0, 1)
        except OSError as error:
            log.error("image %s: its cache fails, and reads pass it by: %s", image.name, error)
            moved, left = 0, 1
        moves.note(image, moved, left, fetched)

    def _forget(self, image: Image) -> None:
        for kind in ("meta", "data", "open"):
            self._files.of(image, kind).unlink(missing_ok=True)


@dataclass
class _Moves:
    """How it went to move an image's blocks into its cache. ``done_at``: bytes fetched when there were none left.

    While nothing is moved, the next try comes later and later: the cache's disk may be full, or fail.
    """

    done_at: int = -1
    backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_PAUSE, _LAST_PAUSE))
    fruitless: int = 0
    passed_by: bool = False

    def note(self, image: Image, moved: int, left: int, fetched: int) -> None:
        """So many blocks were moved, and so many are left of what was fetched until now."""
        self.done_at = -1 if left else fetched
        if moved or not left:
            self.fruitless = 0
            self.backoff.reset()
            return
        self.fruitless += 1
        if self.fruitless >= _PATIENCE:
            self.backoff.note_failure()
        if self.fruitless == _PATIENCE:
            log.warning("image %s: its cache takes nothing in; the rest comes from the parents", image.name)


def _is_passed_by(image: Image) -> bool:
    """Whether the first map has gone over to the parents, which is for good. Raises CommandFailed.

    Linux: drivers/md/dm-raid1.c, mirror_status: how many legs and which, how far they are in sync, a 1, and a letter
    for the health of each, A if it is alive.
    """
    if not devmapper.exists(_top(image)):
        return False
    _start, _length, kind, *told = devmapper.status(_top(image)).split()
    if kind != "mirror":  # of an image that is too small for one
        return False
    legs, *rest = told
    return not rest[int(legs) + 2].startswith("A")


def _takes_blocks(image: Image) -> bool:
    """Whether dm-cache can write its metadata. If not, each read makes it try, and say so in the kernel's log.

    Raises CommandFailed.
    """
    # Linux: admin-guide/device-mapper/cache, status: the mode of the metadata, and whether it needs a check
    return devmapper.status(_inner(image).name).split()[-2:] == ["rw", "-"]


def _closed_whole(meta: Path) -> bool:
    """Whether the metadata was written when the cache was closed, so that dm-cache takes no block for a changed one.

    Linux: drivers/md/dm-cache-metadata.c, struct cache_disk_superblock and superblock_flag_bits.
    """
    with meta.open("rb") as file:
        file.seek(_FLAGS)
        return file.read(len(_CLEAN_SHUTDOWN)) == _CLEAN_SHUTDOWN


def _start_origin(image: Image, base: Path) -> Path:
    """The device that keeps what is read from ``base`` in memory, up to whole blocks."""
    used, end = image.size // _SECTOR, _blocks(image) * BLOCK // _SECTOR
    table = [f"0 {used} linear {base} 0", *([f"{used} {end - used} zero"] if end > used else [])]
    return onefetch.start(label(image), table, end)


def _move(image: Image, seconds: float) -> tuple[int, int]:
    """Have dm-cache copy the blocks that are in memory below it, and free the memory. How many it did, and did not.

    It does so for so many seconds, once it is known which they are: of a large image that takes its time as well.
    Raises OSError if the cache cannot be read.
    """
    source, below = onefetch.source(label(image)), devmapper.counters(onefetch.device(label(image)))
    left = _resident(source, _blocks(image))
    all_of_them, end = len(left), time.monotonic() + seconds
    with opened(_inner(image), os.O_DIRECT) as cache, opened(source) as memory, opened(below) as counters:
        for _ in range(_PASSES):
            waiting, left = left, {}
            for block, offset in waiting.items():
                if time.monotonic() < end and _promoted(cache, offset, counters):
                    os.posix_fadvise(memory, block * BLOCK, BLOCK, os.POSIX_FADV_DONTNEED)
                else:
                    left[block] = offset
    return all_of_them - len(left), len(left)


def _resident(device: Path, blocks: int) -> dict[int, int]:
    """Blocks of a device with a page in memory, and the offset in bytes of their first such page."""
    found: dict[int, int] = {}
    with opened(device) as fd:
        for start in range(0, blocks * BLOCK, _LOOKED_AT):
            present = _pages(fd, start, min(_LOOKED_AT, blocks * BLOCK - start))
            page = present.find(1)
            while page >= 0:
                block = (start + page * _PAGE) // BLOCK
                found[block] = start + page * _PAGE
                page = present.find(1, ((block + 1) * BLOCK - start) // _PAGE)
    return found


def _pages(fd: int, start: int, length: int) -> bytes:
    """A 1 for each page of a range that is in memory, else 0 (mincore(2)). Raises OSError."""
    vector = (ctypes.c_ubyte * (length // _PAGE))()
    with mmap.mmap(fd, length, access=mmap.ACCESS_COPY, offset=start) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(length), vector)
        del first
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
    return bytes(vector)


def _blocks(image: Image) -> int:
    return -(-image.size // BLOCK)


def _top(image: Image) -> str:
    return f"virtman-cache-{label(image)}"


def _inner(image: Image) -> Path:
    return devmapper.map_path(f"virtman-cachein-{label(image)}")


def _reads(counters: int) -> int:
    """Sectors read from a device until now, by its open file ``stat`` in /sys."""
    return int(os.pread(counters, 256, 0).split()[2])


def _promoted(cache: int, offset: int, counters: int) -> bool:
    """Read a page until a read causes none below the cache: then the cache has answered."""
    with mmap.mmap(-1, _PAGE) as buffer:
        before = _reads(counters)
        for _ in range(_BURST):
            os.preadv(cache, [buffer], offset)
            after = _reads(counters)
            if after == before:
                return True
            before = after
    return False
