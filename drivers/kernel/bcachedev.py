"""The kernel's bcache, by its files in /sys (Linux: admin-guide/bcache). A device is named by its map.

A set is the cache: one device, to which backing devices, the images, are attached while they are read.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable
from pathlib import Path

from drivers.errors import BadDisk, CommandFailed, NotReleased
from drivers.host import retry
from drivers.host.command import run
from drivers.host.folders import matching
from drivers.kernel import devmapper, kernellog

log = logging.getLogger(__name__)

SUPERBLOCK = 8192
"""Bytes at the start of a device, in which its superblock lies."""

PATIENCE = 30.0
"""Seconds until the kernel's workers must have done what was asked for."""

_LONGEST = 600.0
"""Seconds for a volume whose index is read as it starts."""

UNUSED_IN_YOUTH = 97
"""Per cent of unused buckets, above which a set is young: see ``begin_young``."""

YOUNG, OLD = "random", "lru"
"""The replacement policies of sets."""

_FS = Path("/sys/fs/bcache")
_POLICY = "cache0/cache_replacement_policy"
_NO_NUMBER = "no room for UUID"


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
    """Have bcache release a map. Raises NotReleased."""
    if not devmapper.exists(name):
        return
    home, running = settings(name), running_set(name)
    if running:
        tell(running / _POLICY, OLD)  # for the next start, before ``begin_young``
    if home.exists():
        tell((running or home) / "stop", "1")  # one that has failed stops by itself
        wait(lambda: not home.exists(), name)


def disk(name: str, **values: str) -> Path:
    """Where a registered backing device is read, with these settings. Raises NotReleased, OSError."""
    home = settings(name)
    wait((home / "dev/dev").exists, f"bcache device of {name}")
    for setting, value in values.items():
        (home / setting).write_text(value)
    return Path("/dev") / (home / "dev").resolve().name


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
    return [name for link in matching(home, "bdev*") if (name := _name_of(link))]


def _name_of(link: Path) -> str:
    """The name of a member, from the link to its folder; empty if it leaves just now. Raises OSError."""
    try:
        return (link / "../dm/name").read_text().strip()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
    try:
        device = link.readlink().parent.name
    except FileNotFoundError:
        return ""
    return "" if device.startswith("dm-") else device


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


def begin_young(home: Path) -> None:
    """Have a set that has just started evict random buckets, until ``end_youth`` finds it old.

    bcache counts the age of a bucket in steps of 1/1024 of the set's size that were read, and divides the age of the
    oldest by 8 (Linux: drivers/md/bcache/alloc.c, bucket_prio). While that gives 0, it prefers no unused bucket to the
    oldest, and evicts what was just fetched in a set that is nearly empty. Of random buckets few are in use then. Only
    as a set starts it prefers unused ones, and takes hundreds of them, by the policy in the superblock: see ``stop``.
    """
    tell(home / _POLICY, YOUNG)


def end_youth(home: Path) -> None:
    """Have a set evict what was not used for longest, once enough buckets are in use. Raises OSError.

    To be called now and then. Of a young set the kernel sorts all buckets to tell how many are in use: 160 ms of an
    emulated processor for the 131072 of 64 GiB.
    """
    if f"[{YOUNG}]" in (home / _POLICY).read_text() and _unused(home) <= UNUSED_IN_YOUTH:
        tell(home / _POLICY, OLD)


def _target(link: Path) -> Path | None:
    """The set to which a link leads, which the kernel may take away at any time."""
    try:
        home = _FS / link.readlink().name
    except OSError:
        return None
    return home if home.exists() else None


def _unused(home: Path) -> int:
    """Per cent of the buckets."""
    line = (home / "cache0/priority_stats").read_text().splitlines()[0]
    return int(line.split()[-1].rstrip("%"))


def wait(done: Callable[[], bool], what: str) -> None:
    """Wait until the kernel's workers have done what was asked for. Raises NotReleased."""
    if not retry.until(done, limit=PATIENCE, first=0.005, longest=0.25):
        raise NotReleased(what, PATIENCE)
