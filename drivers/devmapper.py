"""Device-mapper maps by name. All calls are idempotent.

dmsetup(8) changes them; which there are is read in /sys, without a process for each look (Linux:
Documentation/ABI/testing/sysfs-block-dm).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from drivers import udevrules
from drivers.command import run

_NUMBER = re.compile(r"\d+:\d+")
_DEV_ARM_POLL = 0xC138FD10  # linux/dm-ioctl.h: _IOWR(0xfd, 16, struct dm_ioctl)
_IOCTL_LENGTH = 312
_FAILED_PATH = re.compile(r"(\d+:\d+) F \d+")

SECTOR = 512
"""Bytes: device-mapper counts in sectors of this size, whatever the disk's are."""

_UNPROBED = ("--noudevrules", "--noudevsync", "--verifyudev")
"""udev's rules do not look at the map: a probe of one that waits for its parents would hang, and each probe reads. The
last option has dmsetup make and remove the node in udev's stead (dmsetup(8))."""


def map_path(name: str) -> Path:
    """The node of a map."""
    return Path("/dev/mapper") / name


def create(name: str, table: Iterable[str], *, read_only: bool = False) -> Path:
    """Make a map of these lines, unless there is one of this name, that udev leaves alone. Returns its node.

    Raises CommandFailed, CommandTimedOut, ToolMissing.
    """
    if not exists(name):
        udevrules.apply()
        options = ["--readonly"] if read_only else []
        with _lines(table) as file:
            run(["dmsetup", "create", name, *_UNPROBED, *options, file])
    return map_path(name)


def remove(name: str) -> None:
    """Remove a map; its user must have closed it. Raises CommandFailed, CommandTimedOut."""
    if exists(name):
        run(["dmsetup", "remove", *_UNPROBED, "--retry", name])


def reload(name: str, table: Iterable[str], *, read_only: bool = False) -> None:
    """Give a map another table. Requests in flight are held meanwhile. Raises CommandFailed, CommandTimedOut."""
    options = ["--readonly"] if read_only else []
    with _lines(table) as file:
        run(["dmsetup", "load", *options, name, file])
    # Without flushing: a pool that is out of space could not.
    run(["dmsetup", "suspend", "--noflush", "--nolockfs", name])
    run(["dmsetup", "resume", *_UNPROBED, name])


def rename(old: str, new: str) -> None:
    """Give a map another name, while it is in use. Raises CommandFailed, CommandTimedOut."""
    run(["dmsetup", "rename", *_UNPROBED, old, new])


def events(name: str) -> int:
    """How many events the map has had. Raises CommandFailed."""
    return int(run(["dmsetup", "info", "--columns", "--noheadings", "--options", "events", name]).stdout)


def openers(name: str) -> int:
    """How many have the map open, other maps included. Raises CommandFailed."""
    return int(run(["dmsetup", "info", "--columns", "--noheadings", "--options", "open", name]).stdout)


def message(name: str, text: str) -> None:
    """Send a message to the first target of a map. Raises CommandFailed."""
    run(["dmsetup", "message", name, "0", text])


class Events:
    """Tells when any map of this host has had an event: a path that failed, a new table (Linux: linux/dm-ioctl.h)."""

    def __init__(self) -> None:
        """Raises OSError without device-mapper."""
        self._control = os.open("/dev/mapper/control", os.O_RDONLY | os.O_CLOEXEC)
        self.arm()

    def fileno(self) -> int:
        """What to poll: it is readable after an event."""
        return self._control

    def arm(self) -> None:
        """Wait for the next event. To be called before maps are looked at, so that none is missed."""
        argument = bytearray(_IOCTL_LENGTH)
        argument[0:4] = (4).to_bytes(4, "little")  # the version
        argument[12:16] = _IOCTL_LENGTH.to_bytes(4, "little")
        fcntl.ioctl(self._control, _DEV_ARM_POLL, argument)

    def happened(self) -> bool:
        """Whether there was an event since it was armed. If so, it is armed again."""
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        if not poller.poll(0):
            return False
        self.arm()
        return True

    def close(self) -> None:
        """Stop listening."""
        os.close(self._control)


class FailedPaths:
    """The failed paths of multipath maps, for who asks often: a map is asked, by a process, only after an event."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: Events | None = None
        self._known: dict[str, list[str]] = {}

    def of(self, name: str) -> list[str]:
        """As ``failed_paths``. Raises CommandFailed, OSError."""
        with self._lock:
            if self._events is None:
                self._events = Events()
            elif self._events.happened():
                self._known.clear()
            if name not in self._known:
                self._known[name] = failed_paths(name)
            return self._known[name]


def failed_paths(name: str) -> list[str]:
    """The devices, by their numbers, that a multipath map does not read by any more. Raises CommandFailed."""
    return _FAILED_PATH.findall(status(name))


def reinstate(name: str, failed: Iterable[str]) -> None:
    """Have a multipath map read by these failed paths again. Raises CommandFailed."""
    for path in failed:
        message(name, f"reinstate_path {path}")


def either(first: Path, second: Path, sectors: int) -> str:
    """A table that reads from the second device what the first one fails to give (Linux: drivers/md/dm-mpath.c)."""
    groups = " ".join(f"round-robin 0 1 0 {number(device)}" for device in (first, second))
    return f"0 {sectors} multipath 2 queue_mode bio 0 2 1 {groups}"


def status(name: str) -> str:
    """The status line of a map's target: start, length, type, and what that type says. Raises CommandFailed."""
    return run(["dmsetup", "status", name]).stdout.strip()


def table(name: str) -> str:
    """The table of a map, with devices by their numbers. Raises CommandFailed."""
    return run(["dmsetup", "table", name]).stdout.strip()


def numbers_in(table: str) -> list[str]:
    """The devices that a table names."""
    return _NUMBER.findall(table)


def number(device: Path) -> str:
    """The number by which a table names a block device: ``major:minor``."""
    rdev = device.stat().st_rdev
    return f"{os.major(rdev)}:{os.minor(rdev)}"


def counters(device: Path) -> Path:
    """The file with a block device's counters (Linux: block/stat)."""
    return Path(f"/sys/dev/block/{number(device)}/stat")


def exists(name: str) -> bool:
    """Whether there is a map of this name."""
    return name in names(name)


def names(prefix: str) -> frozenset[str]:
    """The maps whose names begin like this."""
    found = set()
    for file in Path("/sys/block").glob("dm-*/dm/name"):
        with contextlib.suppress(OSError):  # it may be going
            found.add(file.read_text().strip())
    return frozenset(name for name in found if name.startswith(prefix))


@contextmanager
def _lines(table: Iterable[str]) -> Iterator[str]:
    """A file with a table: dmsetup takes no more than one line as an argument."""
    with tempfile.NamedTemporaryFile("w", suffix=".table") as file:
        file.writelines(f"{line}\n" for line in table)
        file.flush()
        yield file.name
