"""Device-mapper maps by name. All calls are idempotent, and raise CommandFailed, CommandTimedOut, OSError.

Names are the machine's. The UUID of a map names its owner: ``VIRTMAN-<owner>-<random>``. This process acts for one
owner (drivers/kernel/ownership.py) and sees its maps. A map of the same name that is another's stays as it is, and all
calls with its name raise NotOurs.

dmsetup(8) changes maps, since it may have to wait, and a process can be killed. What takes no time goes without a
process (drivers/kernel/dmioctl.py).
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from drivers.errors import DriverError, NotOurs
from drivers.host import blockdev
from drivers.host.command import run
from drivers.kernel import dmioctl, udevrules
from drivers.kernel.dmioctl import Known

log = logging.getLogger(__name__)

_NUMBER = re.compile(r"\d+:\d+")

SECTOR = 512
"""Bytes: device-mapper counts in sectors of this size, whatever the disk's are."""

_REGION = 1 << 15
"""Sectors for which a mirror keeps a few bits, and which no request of one crosses: 16 MiB."""

RELOAD_LIMIT = 60.0
"""Seconds for which a new table waits at most for requests that are on their way below the map."""

SUSPEND_LIMIT = 30.0
"""Seconds for which a map's users wait at most for it to be suspended."""

_UNPROBED = ("--noudevrules", "--noudevsync", "--verifyudev")
"""udev's rules do not probe the map: a probe of a map that waits for its parents would hang, and each probe reads. The
last option has dmsetup make and remove the node in udev's stead (dmsetup(8))."""

OWNERS = Path("/run/virtman-kernel/owners")
"""A file for each owner of maps since the boot, with its state folder."""

_MAKER = "VIRTMAN-"
_acting_for = ""


def act_for(owner: str) -> None:
    """Have this process see and make maps of an owner; of nobody if ``owner`` is empty."""
    global _acting_for  # noqa: PLW0603  (names are the machine's, and a process works for one agent)
    _acting_for = owner


def map_path(name: str) -> Path:
    """The node of a map."""
    return Path("/dev/mapper") / name


def create(name: str, table: Iterable[str], *, read_only: bool = False, group: int | None = None) -> Path:
    """Make a map of these lines, unless there is one of this name, that udev leaves alone. Returns its node.

    ``group``: whose members may use it. A map that a killed dmsetup left without a table is made anew.
    """
    if exists(name) and not size(name):
        remove(name)
    if not exists(name):
        udevrules.apply()
        options = ["--readonly"] if read_only else []
        if group is not None:
            options += ["--gid", str(group), "--mode", "0660"]
        if _acting_for:
            options += ["--uuid", f"{_MAKER}{_acting_for}-{uuid.uuid4().hex}"]
        with _lines(table) as file:
            run(["dmsetup", "create", name, *_UNPROBED, *options, file])
    return map_path(name)


def remove(name: str) -> None:
    """Remove a map; its user must have closed it."""
    if exists(name):
        run(["dmsetup", "remove", *_UNPROBED, "--retry", name])


def remove_when_closed(name: str) -> None:
    """Remove a map now, or when nobody has it open any more. Its node goes at once."""
    if exists(name):
        run(["dmsetup", "remove", "--deferred", *_UNPROBED, name])
        map_path(name).unlink(missing_ok=True)


def reload(name: str, table: Iterable[str], *, read_only: bool = False, timeout: float = RELOAD_LIMIT) -> None:
    """Give a map another table. New requests wait meanwhile.

    Requests below the map have to end first; if they do not within ``timeout`` seconds, the map keeps its table.
    """
    _own(name)
    options = ["--readonly"] if read_only else []
    with _lines(table) as file:
        run(["dmsetup", "load", *options, name, file])
    resume(name, timeout=timeout)


def drop_loaded(name: str) -> None:
    """Forget a table that was loaded and not used yet, because the process that loaded it died.

    Until then the kernel counts its devices as devices of the map (Linux: drivers/md/dm.c, open_table_device).
    """
    _own(name)
    run(["dmsetup", "clear", name])


def resume(name: str, *, timeout: float = RELOAD_LIMIT) -> None:
    """Have a map use the table that was loaded last, and go on if it was suspended."""
    _own(name)
    # It suspends a map with a new table first, without flushing: a pool that is out of space could not. A wait for
    # requests that is cut off leaves the old table, and throws the new one away (Linux: do_resume, dm_swap_table).
    run(["dmsetup", "resume", "--noflush", "--nolockfs", *_UNPROBED, name], timeout=timeout)


@contextmanager
def suspended(name: str) -> Iterator[None]:
    """Within it nothing of a map is read or written: requests that were begun are done, and others wait.

    A process that is killed within it leaves the map suspended: see ``is_suspended``. Requests may wait for a parent,
    or for room in a pool, which cannot even grow meanwhile (Linux: drivers/md/dm-thin.c, pool_suspend_active_thins).
    After SUSPEND_LIMIT the map goes on.
    """
    _own(name)
    try:
        run(["dmsetup", "suspend", "--nolockfs", name], timeout=SUSPEND_LIMIT)
        yield
    except BaseException:
        try:
            resume(name)
        except (DriverError, OSError) as error:
            log.error("the map %s may be suspended, so that its users wait: %s", name, error)
        raise
    resume(name)


def is_suspended(name: str) -> bool:
    """Whether there is a map whose users wait for a ``resume``."""
    return _shown(_own(name), "dm/suspended") == "1"


def size(name: str) -> int:
    """Bytes of a map; 0 if it is not there, or has no table."""
    return int(_shown(_own(name), "size") or 0) * SECTOR


def rename(old: str, new: str) -> None:
    """Give a map another name, while it is in use."""
    _own(old)
    run(["dmsetup", "rename", *_UNPROBED, old, new])


def all_events(prefix: str) -> dict[str, int]:
    """How many events each of our maps has had whose name begins so: a path that failed, a threshold reached."""
    return {name: found.events for name, found in _listed(prefix).items() if _is_ours(found)}


def openers(name: str) -> int:
    """How many have the map open, other maps included."""
    return int(run(["dmsetup", "info", "--columns", "--noheadings", "--options", "open", name]).stdout)


def message(name: str, text: str) -> None:
    """Send a message to the first target of a map, and wait for what it does."""
    _own(name)
    run(["dmsetup", "message", name, "0", text])


def tell(name: str, text: str) -> None:
    """As ``message``, but only for what is done at once. Raises OSError also while the map is suspended."""
    _own(name)
    dmioctl.send(name, text)


def failing_over(first: Path, second: Path, sectors: int) -> str:
    """A table that reads from the second device, for good, once the first one has failed a read by any error.

    For reading alone. A multipath target passes on a disk's error of a bad sector; this one does not (Linux:
    linux/blk_types.h, blk_path_error; drivers/md/dm-raid1.c, mirror_end_io).
    """
    region = min(_REGION, 1 << sectors.bit_length() - 1)
    if region == 1:  # too little for a mirror
        return f"0 {sectors} linear {number(second)} 0"
    devices = f"{number(first)} 0 {number(second)} 0"
    return f"0 {sectors} mirror core 2 {region} nosync 2 {devices} 1 handle_errors"


def pieces(start: int, sectors: int, device: Path, first: int, size: int) -> list[str]:
    """Lines of a table, from sector ``start`` on, over a device from its sector ``first`` on.

    They let no request cross a multiple of ``size`` bytes; what is left at the end is shorter than that. A striped
    target with one stripe does nothing else (Linux: drivers/md/dm-stripe.c).
    """
    chunk = size // SECTOR
    even = sectors // chunk * chunk
    lines = [f"{start} {even} striped 1 {chunk} {device} {first}"] if even else []
    return [*lines, f"{start + even} {sectors - even} linear {device} {first + even}"] if sectors > even else lines


def status(name: str) -> str:
    """The status line of a map's target: start, length, type, and what that type says; dm-cache and thin pools
    write their metadata first."""
    return run(["dmsetup", "status", name]).stdout.strip()


def table(name: str) -> str:
    """The table of a map, with devices by their numbers."""
    return run(["dmsetup", "table", name]).stdout.strip()


def numbers_in(table: str) -> list[str]:
    return _NUMBER.findall(table)


def number(device: Path) -> str:
    """The number by which a table names a block device: ``major:minor``."""
    return blockdev.number(device.stat().st_rdev)


def counters(device: Path) -> Path:
    """The file with a block device's counters (Linux: block/stat)."""
    return Path(f"/sys/dev/block/{number(device)}/stat")


def counted(name: str) -> list[str]:
    """The counters of a map. Raises OSError also if the map is not there."""
    return counters(map_path(name)).read_text().split()


def exists(name: str) -> bool:
    """Whether there is a map of this name."""
    return _own(name) is not None


def names(prefix: str) -> frozenset[str]:
    """Our maps whose names begin like this."""
    return frozenset(name for name, found in _listed(prefix).items() if _is_ours(found))


def others(prefix: str) -> frozenset[str]:
    """The maps whose names begin like this and which are not ours."""
    return frozenset(name for name, found in _listed(prefix).items() if not _is_ours(found))


def _listed(prefix: str) -> dict[str, Known]:
    return {name: found for name, found in dmioctl.listing().items() if name.startswith(prefix)}


def _is_ours(map_: Known) -> bool:
    """Whether this process acts for its owner."""
    return map_.uuid.startswith(f"{_MAKER}{_acting_for}-") if _acting_for else not map_.uuid.startswith(_MAKER)


def _whose(map_: Known) -> str:
    """The owner of a map, for people."""
    if not map_.uuid.startswith(_MAKER):
        return "somebody else's"
    owner = map_.uuid.removeprefix(_MAKER).partition("-")[0]
    try:
        return f"of {(OWNERS / owner).read_text().strip()} (owner {owner})"
    except OSError:
        return f"of an unknown owner ({owner})"


def _own(name: str) -> Known | None:
    """Our map of this name, if it is there. Raises NotOurs."""
    found = dmioctl.find(name)
    if found is not None and not _is_ours(found):
        raise NotOurs(name, _whose(found))
    return found


def _shown(found: Known | None, attribute: str) -> str:
    """A file of sysfs about a map; empty if the map is not there, or has gone since."""
    if found is None:
        return ""
    try:
        return Path(f"/sys/block/dm-{found.minor}", attribute).read_text().strip()
    except FileNotFoundError:
        return ""


@contextmanager
def _lines(table: Iterable[str]) -> Iterator[str]:
    """A file with a table: dmsetup takes no more than one line as an argument."""
    with os.fdopen(os.memfd_create("table"), "w") as file:  # also where the file systems are full
        file.writelines(f"{line}\n" for line in table)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
