"""Keep what was read from the parents in one bcache pool, which all images of the host share (the cache group).

The pool is a bcache cache set on a loop device over a sparse file; each image attaches to it as a backing device and
leaves it again while the others go on. bcache wants its superblock at the start of a backing device: below it lies a
linear map of a small local header and the device of the parents. Above it a map splits large reads, see SPLIT::

    virtman-cache-NAME-KEY (read-only) -> bcacheN -> virtman-cacheof-NAME-KEY -> header's loop device, parents
                                             └-----> virtman-cachepool        -> pool's loop device

The header names the image in the pool by a random UUID, and a pool gives each UUID a number of its own, which it never
gives again: without the header nothing finds what the pool holds of a removed image, until its buckets are used anew.
bcache keeps a journal of which ranges the pool holds and has the data on the disk before the journal names them, so a
power cut costs only what was fetched last. A superblock that bcache refuses is thrown away with what it describes.

Superblocks lie 8 KiB into the files, so that udev, which looks at loop devices, does not find and register them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from drivers import devmapper, loopdev
from drivers.base import CacheStats, Device, Existing, Image, Place
from drivers.cachefiles import checked_key, file_bytes, file_of, key_of
from drivers.command import run
from drivers.errors import BadDevice, BadDisk, DriverError, InUse, NoSpace, NotReleased
from drivers.names import checked
from drivers.needs import DEVICE_MAPPER, DMSETUP, LOOP, LOSETUP, MODPROBE, Needs, Tool

log = logging.getLogger(__name__)

POOL_SIZE = 64 << 30
"""Bytes the sparse file may grow to.

Not every fast read is kept. Of 1 MiB direct reads, each range read twice, 40 and 64 MiB were fetched 1.0 times, 128 MiB
1.21 times and 200 MiB 1.12 times (Linux 6.1, one run each). Probably nothing is kept while bcache's list of free
buckets, which holds 1/1024 of the pool, is empty; that is not proven.
"""

BUCKET = 512 << 10
"""Bytes: the unit that the pool gives to an image and takes away again. The fewer there are, the sooner bcache has
written down a refill of its free list. A pool knows BUCKET/128 images in its life (struct uuid_entry)."""

SPLIT = 64 << 10
"""Bytes of the largest read that reaches bcache: for each read it keeps only the first range that it had to fetch."""

RESERVE = 16 << 20
"""Bytes that must be free to make a pool."""

_POOL_MAP = "virtman-cachepool"
_SECTOR = devmapper.SECTOR
_SHIFT = 8192
_HEADER = 8192
_PATIENCE = 30.0

_FS = Path("/sys/fs/bcache")
# struct cache_sb_disk of the kernel's drivers/md/bcache/bcache_ondisk.h, 4 KiB into the device
_MAGIC_AT, _SET_AT = 4096 + 24, 4096 + 56
_MAGIC = bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81")


class BcacheCache:
    """The pool and the headers in ``<state>/cache``. There is one pool on a host."""

    needs = Needs(
        tools=(Tool("make-bcache", "bcache-tools"), DMSETUP, LOSETUP, MODPROBE),
        modules=("bcache",),
        nodes=(DEVICE_MAPPER, LOOP),
        root=True,
    )

    def __init__(self, place: Place, *, pool_size: int = POOL_SIZE, bucket: int = BUCKET, split: int = SPLIT) -> None:
        self._folder = place.state / "cache"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._pool = self._folder / "pool"
        self._pool_size, self._bucket, self._split = pool_size, bucket, split
        self._lock = threading.Lock()
        """Nobody stops the pool while somebody joins it."""

    def open(self, image: Image, base: Device) -> Device:
        """A read-only disk over ``base`` that keeps what it reads. A damaged pool or header starts empty.

        Raises BadDevice, BadDisk if the image's size is no multiple of 512, NoSpace, NotReleased, CommandFailed.
        """
        if base.path is None:
            raise BadDevice(f"image {image.name}: what is below the cache is no kernel device")
        if image.size % _SECTOR:
            raise BadDisk(f"image {image.name}: its size {image.size} is not a multiple of {_SECTOR}")
        top = _top(image)
        with self._lock:
            if not devmapper.exists(top):
                try:
                    disk = self._start_disk(image, base.path, self._start_pool())
                    devmapper.create(top, self._splitting(disk, image.size // _SECTOR), read_only=True)
                except (DriverError, OSError):
                    self._undo(image)
                    raise
        return Device(size=image.size, path=devmapper.map_path(top))

    def close(self, image: Image) -> None:
        """Remove all but the header and what the pool holds; the pool is stopped with its last image.

        Raises CommandFailed if somebody reads from the disk, NotReleased.
        """
        with self._lock:
            self._close(image)

    def remove(self, key: str) -> int:
        """Make unreachable what the pool holds of an image. Returns the bytes of the header: the pool does not shrink.

        Raises InUse if the image is open.
        """
        with self._lock:
            headers = list(self._folder.glob(f"{checked_key(key)}-*.header"))
            for header in headers:
                if loopdev.device_of(header):
                    raise InUse(header)
            freed = sum(file_bytes(header) for header in headers)
            for file in self._folder.glob(f"{key}-*"):
                file.unlink()
        return freed

    def stats(self, image: Image) -> CacheStats:
        """``held_bytes``: what was fetched for the image since its header was made, at most its size.

        bcache does not count what it holds per image. The figure is too high for what was fetched and not kept, or
        dropped since for other images. ``file_bytes`` is the whole pool's, which all images share.
        """
        return CacheStats(held_bytes=min(self._count(image), image.size), file_bytes=file_bytes(self._pool))

    def existing(self) -> Existing:
        """Keys of the images with a header, whole or half made."""
        files = [path for kind in ("header", "new") for path in self._folder.glob(f"*-*.{kind}")]
        details = {key_of(path): str(path) for path in files}
        return Existing(frozenset(details), details)

    def _start_pool(self) -> str:
        """The UUID of the pool's cache set, which runs afterwards."""
        if not _FS.exists():
            run(["modprobe", "bcache"])
        if not self._pool.exists():
            self._make_pool()
        self._attach_pool()
        try:
            _register(devmapper.map_path(_POOL_MAP))
        except BadDisk as error:
            log.warning("the cache pool %s is thrown away: %s", self._pool, error)
            self._detach_pool()
            self._make_pool()
            self._attach_pool()
            _register(devmapper.map_path(_POOL_MAP))
        home = (_sys(_POOL_MAP) / "bcache/set").resolve()
        for threshold in ("congested_read_threshold_us", "congested_write_threshold_us"):
            (home / threshold).write_text("0")
        return home.name

    def _make_pool(self) -> None:
        free = shutil.disk_usage(self._folder).free
        if free < RESERVE:
            raise NoSpace(self._pool, free, RESERVE)
        fresh = self._pool.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with fresh.open("wb") as file:
            file.truncate(self._pool_size)
        run(["make-bcache", "-C", "--bucket", str(self._bucket), "--block", str(_SECTOR), str(fresh)])
        # The tool knows no offset: its superblock, the only thing that it writes, moves to where udev does not look.
        with fresh.open("r+b") as file:
            made = file.read(_HEADER)
            file.seek(0)
            file.write(bytes(_SHIFT) + made)
            file.truncate(self._pool_size + _SHIFT)
        fresh.rename(self._pool)

    def _attach_pool(self) -> None:
        loop = loopdev.attach(self._pool)
        sectors = (self._pool.stat().st_size - _SHIFT) // _SECTOR
        devmapper.create(_POOL_MAP, [f"0 {sectors} linear {loop} {_SHIFT // _SECTOR}"])

    def _detach_pool(self) -> None:
        devmapper.remove(_POOL_MAP)
        loopdev.detach(self._pool)

    def _stop_pool(self) -> None:
        """Stop the pool if no image is in it."""
        if devmapper.exists(_POOL_MAP):
            home = _sys(_POOL_MAP) / "bcache/set"
            if home.exists():
                home = home.resolve()
                if any(home.glob("bdev*")):
                    return
                (home / "stop").write_text("1")
                _wait(lambda: not home.exists(), "cache pool")
        self._detach_pool()

    def _start_disk(self, image: Image, base: Path, pool: str) -> Path:
        """The bcache device of an image, which is in the pool afterwards."""
        below, header = _below(image), self._header(image)
        if not devmapper.exists(below):
            if header.exists() and _set_of(header) != pool:
                log.warning("image %s: its cache starts empty: %s is not of this pool", image.name, header)
                self._forget(image)
            if not header.exists():
                self._make_header(image, pool)
            self._attach_disk(image, base)
        try:
            _register(devmapper.map_path(below))
        except BadDisk as error:
            log.warning("image %s: its cache starts empty: %s", image.name, error)
            self._detach_disk(image)
            self._forget(image)
            self._make_header(image, pool)
            self._attach_disk(image, base)
            _register(devmapper.map_path(below))
        settings = _sys(below) / "bcache"
        _wait((settings / "dev/dev").exists, f"bcache device of image {image.name}")
        (settings / "sequential_cutoff").write_text("0")
        return Path("/dev") / (settings / "dev").resolve().name

    def _make_header(self, image: Image, pool: str) -> None:
        fresh = file_of(self._folder, image, "new")
        fresh.unlink(missing_ok=True)
        with fresh.open("wb") as file:
            file.truncate(_HEADER)
        offset = str(_HEADER // _SECTOR)
        block = str(_SECTOR)
        run(["make-bcache", "-B", "--cset-uuid", pool, "--data-offset", offset, "--block", block, str(fresh)])
        fresh.write_bytes(bytes(_SHIFT) + fresh.read_bytes()[:_HEADER])
        fresh.rename(self._header(image))

    def _attach_disk(self, image: Image, base: Path) -> None:
        loop = loopdev.attach(self._header(image))
        head, data = _HEADER // _SECTOR, image.size // _SECTOR
        table = [f"0 {head} linear {loop} {_SHIFT // _SECTOR}", f"{head} {data} linear {base} 0"]
        devmapper.create(_below(image), table)
        note = {"before": self._note(image).get("now", 0), "now": self._note(image).get("now", 0)}
        self._write_note(image, note)

    def _detach_disk(self, image: Image) -> None:
        devmapper.remove(_below(image))
        loopdev.detach(self._header(image))

    def _close(self, image: Image) -> None:
        devmapper.remove(_top(image))
        below = _below(image)
        if devmapper.exists(below):
            self._count(image)
            settings = _sys(below) / "bcache"
            if settings.exists():
                (settings / "stop").write_text("1")
                _wait(lambda: not settings.exists(), f"bcache device of image {image.name}")
        self._detach_disk(image)
        self._stop_pool()

    def _undo(self, image: Image) -> None:
        """Remove what a failed opening has made. The first error is the one to tell."""
        try:
            self._close(image)
        except (DriverError, OSError) as error:
            log.error("image %s: removing a half made cache failed too: %s", image.name, error)

    def _splitting(self, disk: Path, sectors: int) -> list[str]:
        """A table of a map over ``disk`` that lets no request cross a multiple of SPLIT; a tail is shorter than that.

        A striped target with one stripe does nothing but that (Linux: drivers/md/dm-stripe.c).
        """
        chunk = self._split // _SECTOR
        even = sectors // chunk * chunk
        lines = [f"0 {even} striped 1 {chunk} {disk} 0"] if even else []
        return [*lines, f"{even} {sectors - even} linear {disk} {even}"] if sectors > even else lines

    def _count(self, image: Image) -> int:
        """Bytes fetched from the parents until now, which are also written down."""
        note = self._note(image)
        if devmapper.exists(_below(image)):
            fetched = int((_sys(_below(image)) / "stat").read_text().split()[2]) * _SECTOR
            note["now"] = note.get("before", 0) + max(0, fetched - _HEADER)
            self._write_note(image, note)
        return note.get("now", 0)

    def _note(self, image: Image) -> dict[str, int]:
        try:
            note = json.loads(file_of(self._folder, image, "json").read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return note if isinstance(note, dict) else {}

    def _write_note(self, image: Image, note: dict[str, int]) -> None:
        fresh = file_of(self._folder, image, "json.new")
        fresh.write_text(json.dumps(note))
        fresh.rename(file_of(self._folder, image, "json"))

    def _forget(self, image: Image) -> None:
        self._header(image).unlink(missing_ok=True)
        file_of(self._folder, image, "json").unlink(missing_ok=True)

    def _header(self, image: Image) -> Path:
        return file_of(self._folder, image, "header")


def _top(image: Image) -> str:
    """The map's name, which has at most 127 bytes (Linux: DM_NAME_LEN)."""
    return f"virtman-cache-{checked(image.name)}-{checked_key(image.key)[:16]}"


def _below(image: Image) -> str:
    return f"virtman-cacheof-{checked(image.name)}-{checked_key(image.key)[:16]}"


def _register(node: Path) -> None:
    """Have bcache take a device with a superblock. Raises BadDisk if it refuses."""
    settings = _sys(node.name) / "bcache"
    if settings.exists():
        return
    try:
        (_FS / "register").write_text(str(node))
    except OSError as error:
        if not settings.exists():
            raise BadDisk(f"bcache refuses {node}: {error.strerror}") from error
    if not settings.exists():
        raise BadDisk(f"bcache did not take {node}")


def _sys(name: str) -> Path:
    """The folder of a map in /sys."""
    number = devmapper.map_path(name).stat().st_rdev
    return Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()


def _wait(done: Callable[[], bool], what: str) -> None:
    """Wait until the kernel's workers have done what was asked for. Raises NotReleased."""
    end, pause = time.monotonic() + _PATIENCE, 0.005
    while not done():
        if time.monotonic() > end:
            raise NotReleased(what, _PATIENCE)
        log.debug("waiting for %s", what)
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def _set_of(header: Path) -> str | None:
    """The UUID of the pool that a header belongs to."""
    data = header.read_bytes()[_SHIFT:]
    if data[_MAGIC_AT : _MAGIC_AT + 16] != _MAGIC:
        return None
    text = data[_SET_AT : _SET_AT + 16].hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
