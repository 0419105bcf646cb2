"""The kernel's bcache, by its files in /sys (Linux: admin-guide/bcache). A device is named by its map.

A set is the cache: one device, to which backing devices, the images, are attached while they are read.
"""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path

from drivers.errors import BadDisk, CommandFailed, NotReleased
from drivers.host.command import run
from drivers.kernel import devmapper, kernellog

log = logging.getLogger(__name__)

SUPERBLOCK = 8192
"""Bytes at the start of a device, in which its superblock lies."""

PATIENCE = 30.0
"""Seconds until the kernel's workers must have done what was asked for."""

_LONGEST = 600.0
"""Seconds for a volume whose index is read as it starts."""

YOUNG = 97
"""Per cent of unused buckets, above which a set is young: see ``Replacement``."""

_FS = Path("/sys/fs/bcache")
_NO_NUMBER = "no room for UUID"

# Where the superblock is on a device, and what is where in it (Linux: drivers/md/bcache/bcache_ondisk.h, cache_sb_disk)
_SUPER_AT, _SUPER_SIZE = 4096, 4096
_FLAGS_AT, _KEYS_AT, _KEYS_FROM = 104, 206, 208
_REPLACEMENT = 0b111 << 2
"""The flags that name the replacement policy; lru is 0."""
_WORD = struct.Struct("<Q")
_POLYNOMIAL, _ALL_ONES = 0x42F0E1EBA9EA3693, (1 << 64) - 1


def folder(name: str) -> Path:
    """The files of a map in /sys. Raises OSError if there is no such map."""
    return Path(f"/sys/dev/block/{devmapper.number(devmapper.map_path(name))}")


def settings(name: str) -> Path:
    """The files of a map that is registered; they are missing if it is not."""
    return folder(name) / "bcache"


def register(name: str) -> None:
    """Have bcache take a map with a superblock. Raises BadDisk if it refuses, CommandTimedOut."""
    home = settings(name)
    if home.exists():
        return
    have_told(_FS / "register", str(devmapper.map_path(name)))
    if not home.exists():
        raise BadDisk(f"bcache refuses {name}")


def tell(file: Path, text: str) -> None:
    """Write to a file of bcache's. Whether it obeyed is seen afterwards: the error says less than its state."""
    try:
        file.write_text(text)
    except OSError as error:
        log.debug("bcache: %s to %s: %s", text, file, error)


def have_told(file: Path, text: str) -> None:
    """As ``tell``, by a process of its own, which goes on if this one is killed.

    The kernel makes threads for what is told, and cannot for a process that was killed (Linux: kernel/kthread.c).
    bcache does not cope with that: a set that has no cache yet is freed, and the kernel oopses (seen in
    drivers/md/bcache/super.c, cache_set_free, after bch_cache_set_alloc).
    """
    try:
        run(["sh", "-c", 'printf %s "$1" > "$2"', "sh", text, str(file)], timeout=_LONGEST)
    except CommandFailed as error:
        log.debug("bcache: %s to %s: %s", text, file, error)


def stop(name: str) -> None:
    """Have bcache let go of a map. Raises NotReleased."""
    if not devmapper.exists(name):
        return
    home = settings(name)
    handle = running_set(name) or home
    if home.exists():
        tell(handle / "stop", "1")  # one that has failed stops by itself
        wait(lambda: not home.exists(), name)


def running_set(name: str) -> Path | None:
    """The files of the set that runs on a map."""
    return _target(settings(name) / "set")


def set_of(name: str) -> Path | None:
    """The files of the set to which a backing device is attached."""
    return _target(settings(name) / "cache")


def attached(home: Path) -> list[str]:
    """What is attached to a set: a map by its name, another device by the kernel's for it.

    One that leaves meanwhile, as all do when a set fails, is left out. Raises OSError.
    """
    names = (_name_of(link) for link in _members(home))
    return [name for name in names if name]


def _name_of(link: str) -> str:
    """The name of a member, from the link to its folder; empty if it leaves just now. Raises OSError."""
    try:
        return _read(f"{link}/../dm/name").strip()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
    try:
        device = os.path.basename(os.path.dirname(os.readlink(link)))  # noqa: PTH115, PTH119, PTH120  (as in _members)
    except FileNotFoundError:
        return ""
    return "" if device.startswith("dm-") else device


def _members(home: Path) -> list[str]:
    """Links to the folders of what is attached to a set. Raises OSError."""
    # Asked with each heartbeat, for hundreds: a Path costs more than what it leads to.
    try:
        with os.scandir(home) as entries:
            return sorted(entry.path for entry in entries if entry.name.startswith("bdev"))
    except FileNotFoundError:
        return []


def attach(name: str, home: Path) -> list[str]:
    """Attach a backing device to a set, also while it is read. Returns what bcache said of it, if the set refused.

    Raises CommandTimedOut.
    """
    device = folder(name).resolve().name
    with kernellog.listening() as said:
        have_told(settings(name) / "attach", home.name)
        return [line for line in said() if line.startswith("bcache:") and device in re.findall(r"[\w-]+", line)]


def is_full(refusal: list[str]) -> bool:
    """Whether a set refused a device since it has given all its numbers away.

    The error is the same for whatever it refuses (Linux: drivers/md/bcache/super.c, bch_cached_dev_attach).
    """
    return any(_NO_NUMBER in line for line in refusal)


def detach(name: str) -> None:
    """Detach a backing device from its set, also while it is read. Raises NotReleased."""
    if set_of(name) is not None:
        (settings(name) / "detach").write_text("1")
        wait(lambda: set_of(name) is None, name)


def prefer_unused(name: str) -> None:
    """Before a set starts on a map: have its superblock ask for the policy that takes unused buckets first.

    At a start bcache takes hundreds of buckets into its list of free ones, by the policy in the superblock: that which
    was set last, also before a power cut. A damaged superblock is left to bcache, which refuses it. Raises OSError.
    """
    if settings(name).exists():
        return
    with devmapper.map_path(name).open("r+b", buffering=0) as file:
        file.seek(_SUPER_AT)
        block = bytearray(file.read(_SUPER_SIZE))
        end = _KEYS_FROM + 8 * int.from_bytes(block[_KEYS_AT : _KEYS_AT + 2], "little")
        (checksum,), (flags,) = (_WORD.unpack_from(block, at) for at in (0, _FLAGS_AT))
        if checksum != _crc64(bytes(block[8:end])) or not flags & _REPLACEMENT:
            return
        _WORD.pack_into(block, _FLAGS_AT, flags & ~_REPLACEMENT)
        _WORD.pack_into(block, 0, _crc64(bytes(block[8:end])))
        file.seek(_SUPER_AT)
        file.write(block)
        os.fsync(file.fileno())


class Replacement:
    """Has sets throw away what was not used for longest, or, while they are young, what chance hits.

    bcache counts the age of a bucket in steps of 1/1024 of the set's size that were read, and divides the age of the
    oldest by 8 (Linux: drivers/md/bcache/alloc.c, bucket_prio). While that gives 0, it prefers no unused bucket to the
    oldest, and throws away what was just fetched in a set that is nearly empty. Of buckets chosen at random few are in
    use then.

    Just after a start it does prefer unused ones, see ``prefer_unused``.
    """

    def __init__(self) -> None:
        self._old_from: dict[str, float] = {}
        """Bytes written since its start, from which on a set may be old. The kernel sorts all buckets to tell how many
        are in use: 160 ms of an emulated processor for the 131072 of 64 GiB."""

    def begin(self, home: Path) -> None:
        """A set has started. Raises OSError."""
        self._old_from.pop(home.name, None)
        self.keep(home)

    def keep(self, home: Path) -> None:
        """To be called now and then while a set is in use. Raises OSError."""
        written = _bytes(home / "cache0/written")
        if written < self._old_from.get(home.name, 0):
            return
        left = _unused(home) - YOUNG
        policy = home / "cache0/cache_replacement_policy"
        wanted = "random" if left > 0 else "lru"
        if f"[{wanted}]" not in policy.read_text():
            tell(policy, wanted)
        size = int((home / "cache0/nbuckets").read_text()) * _bytes(home / "cache0/bucket_size")
        self._old_from[home.name] = written + size * left / 100 if left > 0 else math.inf


def _target(link: Path) -> Path | None:
    """The set to which a link leads, which the kernel may take away at any time."""
    try:
        home = _FS / link.readlink().name
    except OSError:
        return None
    return home if home.exists() else None


def _crc64(data: bytes) -> int:
    """The checksum of a superblock (Linux: lib/crc64.c, crc64_be; drivers/md/bcache/util.h, bch_crc64)."""
    crc = _ALL_ONES
    for byte in data:
        crc ^= byte << 56
        for _ in range(8):
            crc = (crc << 1 ^ _POLYNOMIAL if crc >> 63 else crc << 1) & _ALL_ONES
    return crc ^ _ALL_ONES


def _read(file: str) -> str:
    """What a small file says. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, mmap.PAGESIZE).decode()
    finally:
        os.close(fd)


def _unused(home: Path) -> int:
    """Per cent of the buckets."""
    line = (home / "cache0/priority_stats").read_text().splitlines()[0]
    return int(line.split()[-1].rstrip("%"))


def _bytes(file: Path) -> float:
    """A size as bcache writes it, to one decimal (Linux: drivers/md/bcache/util.c, bch_hprint)."""
    text = file.read_text().strip()
    return float(text[:-1]) * (1 << 10 * "?kMGTPEZY".index(text[-1]))


def wait(done: Callable[[], bool], what: str) -> None:
    """Wait until the kernel's workers have done what was asked for. Raises NotReleased."""
    end, pause = time.monotonic() + PATIENCE, 0.005
    while not done():
        if time.monotonic() > end:
            raise NotReleased(what, PATIENCE)
        log.debug("waiting for %s", what)
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
