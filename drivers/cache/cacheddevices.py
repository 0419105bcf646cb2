"""Devices of others, volumes of a storage network say, that VMs of this host read through its cache group.

Writes go through: a device has them before they are acknowledged, at the same offsets as without this, and nothing
else is ever written to it: bcache's superblock is in a local header (backing.py). Above bcache a map splits large
reads, as for images, and above that a multipath map is what a VM gets: it sends to the device itself what bcache
refuses::

    virtman-volume-NAME (multipath) -> virtman-volumesplit-NAME -> bcacheN
             └-----> virtman-volumeraw-NAME (linear) -> device

    bcacheN -> virtman-volumeof-NAME -> header's loop device, device
       └-----> virtman-cachevol-NUMBER -> volume of the cache

The multipath map has no disk itself: at a SCSI disk with a handler, ALUA's say, it would have all paths begin with a
command of that handler, which a map does not know (Linux: drivers/md/dm-mpath.c, setup_scsi_dh and pg_init_done).

**No byte is stale.** What has gone past bcache is not known to it. So the multipath map never goes back to a bcache
device that it has left: it is taken away, and another one made, with a new identity, for which a volume holds nothing.
That is done in two changes of the multipath map's table, which the kernel makes while nothing is on its way: first to
the device alone, then, when a new bcache device is in a volume, to both. The same brings in a volume that comes later,
or a device that has grown. The header lies in memory: no reboot finds it, after which bcache's index may be older than
the device (its writes through are not flushed to the volume).

**What the device fails, fails.** The multipath map holds what neither path takes. A thread of this process sees that
at once, and fails what is held, since the device itself has failed it; then it is tried again for what comes next, as
the device would be (Linux: drivers/md/dm-mpath.c: a path that failed stays failed). What others sent in that moment
is held, too, and fails with it: a map of this type takes no other table than such a one (drivers/md/dm-ioctl.c,
table_load), and in such a one each error fails a path. After any error the cache begins empty, since bcache keeps
what a write was to put there also if the device refused it. So bcache gives a device up at its first error: not each
fails a path of the multipath map (Linux: linux/blk_types.h, blk_path_error: no space, a bad medium).

A detach by force cuts the users of the map off: the driver fails the paths, and the map holds nothing any more. That
needs no answer of the storage. The rest is removed when the requests that the storage has begun have ended.

**What is left**: a write for which bcache has no free bucket, and a read of the same range at the same moment. The
write invalidates the range before the device has the data, so the read may fetch and keep the old bytes. Guests do not
read what they are just writing; programs that share a disk without locks might. A disk with bad blocks should not be
attached: five reads of one bad block failed 44 reads of good ones beside them, and none on the bare device.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections import deque
from pathlib import Path

from drivers.base import Device
from drivers.cache import backing
from drivers.cache.cachegroup import DEVICE, Group
from drivers.cachemodels import CachedDevice, DeviceState
from drivers.door import door
from drivers.errors import (
    BadDevice,
    CommandFailed,
    CommandTimedOut,
    DeviceInUse,
    DeviceRefused,
    DriverError,
    NotReleased,
)
from drivers.host.folders import matching
from drivers.host.watch import Watch
from drivers.kernel import bcachedev, devmapper, loopdev, multipath, udevrules
from drivers.kernel.alarm import Alarm
from drivers.kernel.devmapper import SECTOR
from drivers.kernel.scsi import MAKER, MODEL
from drivers.names import checked

log = logging.getLogger(__name__)

HEADERS = Path("/run/virtman-kernel/devices")
"""In memory, so that a guest's flush, which goes to all that a map is made of, costs nothing there."""

SWAP_LIMIT = 10.0
"""Seconds for which another table waits at most for requests that the storage has begun."""

_TOP, _RAW, _SPLIT, _GONE = "virtman-volume-", "virtman-volumeraw-", "virtman-volumesplit-", "virtman-volumegone-"
"""Maps: what is handed out; the device; what splits; what was handed out and is still open after its user was cut off.
"""

RETURNS, WITHIN = 8, 3600.0
"""How often a device comes into the cache within so many seconds. Each time takes one of the numbers that a volume
gives in its life, and without any left it starts empty, for images too: so a device whose storage fails again and again
stays out meanwhile."""

_OURS = "virtman-"
_LARGEST_BLOCK = 4096
_SMALLEST_CHUNK, _CHUNK = 1 << 20, 1 << 30
"""Bytes: see ``_whole``."""


@door
class Devices:
    """See ``DeviceCache``."""

    needs = Group.needs

    def __init__(self, group: Group, access: int | None, split: int) -> None:
        """``access``: number of a group whose members may use what is handed out; ``split``: as of images."""
        self._group, self._access, self._split = group, access, split
        self._messages = threading.Lock()
        """Held while messages are sent to a map: no map is restored while its users are being cut off."""
        self._checked: set[str] = set()
        """Attachments that this process has restored: a process that died may have left their maps failing requests."""
        self._came: dict[str, deque[float]] = {}
        """When attachments came into the cache, by the monotonic clock."""
        self._watching = threading.Lock()
        self._alarm: Alarm | None = None
        udevrules.leave_alone(HEADERS)

    def attach_device(self, name: str, device: Path) -> Device:
        """See ``DeviceCache``. Without a volume that runs, reads go straight to the device until there is one.

        Raises DeviceRefused, also if the device has shrunk; BadDevice if another one is attached by this name;
        BadName, NotOurs, CommandFailed.
        """
        number, top = _number(device), _TOP + checked(name)
        size = _size(number)
        if devmapper.size(top) == 0:
            self._take(name, device, number)
        elif self._device(name) != number:
            raise BadDevice(f"{devmapper.map_path(top)} is over another device than {number}")
        if size < devmapper.size(top):
            raise DeviceRefused(f"it has shrunk from {devmapper.size(top)} to {size} bytes; detach it first")
        self._watch()
        try:
            if size > devmapper.size(top):
                log.info("%s grows to %d bytes, and its cache starts empty", top, size)
                devmapper.reload(_RAW + name, [_linear(number)], timeout=SWAP_LIMIT)
                self._swap(name, size // SECTOR)
            self.tend_device(name)
        except (DriverError, OSError) as error:
            if size > devmapper.size(top):
                raise
            log.warning("%s is attached without the cache for now: %s", top, error)
        return Device(size=size, path=devmapper.map_path(top))

    def tend_device(self, name: str) -> None:
        """See ``DeviceCache``: a volume takes the device with nothing of it there.

        Raises CommandTimedOut if the storage does not answer, NotReleased, BadName, CommandFailed.
        """
        top = _TOP + checked(name)
        if devmapper.size(top) == 0:
            return
        self._watch()
        if name not in self._checked:
            self._bring_back(name)
            self._checked.add(name)
        if self._state(name) is DeviceState.CACHED:
            return
        number = self._device(name)
        if number is None:
            return
        sectors = devmapper.size(top) // SECTOR
        if _of(_SPLIT, name) in _parts(top):
            log.warning("%s leaves the cache, and comes back with nothing in it", top)
            self._swap(name, sectors)
        self._drop(name)
        came = self._came.setdefault(name, deque(maxlen=RETURNS))
        often = len(came) == RETURNS and time.monotonic() - came[0] < WITHIN
        if not often and self._make(name, number, sectors):
            came.append(time.monotonic())
            self._swap(name, sectors, _of(_SPLIT, name))

    def detach_device(self, name: str, *, force: bool = False) -> None:
        """See ``DeviceCache``. Raises DeviceInUse, NotReleased, BadName, CommandFailed."""
        top = _TOP + checked(name)
        if devmapper.exists(top):
            if force:
                self._cut(top)
            elif devmapper.openers(top):
                raise DeviceInUse(devmapper.map_path(top))
            self._remove_top(name, force=force)
        self._drop(name)
        devmapper.remove(_RAW + name)
        devmapper.remove_when_closed(_GONE + name)
        self._checked.discard(name)
        self._came.pop(name, None)
        with self._watching:
            if self._alarm is not None:
                self._alarm.ring()

    def devices(self) -> list[CachedDevice]:
        """See ``DeviceCache``. In the order of their names. Raises CommandFailed."""
        found = []
        for top in sorted(devmapper.names(_TOP)):
            try:
                found.append(self._described(top.removeprefix(_TOP)))
            except (DriverError, OSError) as error:
                log.info("%s is being removed: %s", top, error)
        return found

    def existing_devices(self) -> frozenset[str]:
        """Names with anything on this host, whole or half made."""
        headers = {path.stem for path in matching(HEADERS, "*")}
        prefixes = (_SPLIT, DEVICE, _RAW, _TOP)
        return frozenset(headers | {name.removeprefix(each) for each in prefixes for name in devmapper.names(each)})

    # What is handed out

    def _take(self, name: str, device: Path, number: str) -> None:
        """Have a device for ourselves, and something to hand out."""
        raw = _RAW + name
        if devmapper.size(raw) == 0:
            self._check(device, number)
            devmapper.create(raw, [_linear(number)])
            # Device-mapper shares a device between its maps: another one may have been made meanwhile.
            strange = _names(_home(number) / "holders") - {bcachedev.folder(raw).resolve().name}
            if strange:
                devmapper.remove(raw)
                raise DeviceRefused(f"it is a part of something: {', '.join(sorted(strange))}")
        line = _multipath(devmapper.size(raw) // SECTOR, _of(_RAW, name))
        devmapper.create(_TOP + name, [line], group=self._access)

    def _check(self, device: Path, number: str) -> None:
        """Raises DeviceRefused if the device is in use, or is none that can be read through the cache."""
        home = _home(number)
        whole = home.parent if (home / "partition").exists() else home
        if mine := self._ours(number, whole):
            raise DeviceRefused(f"it is VirtMan's own: {mine}")
        if _text(home / "ro") != "0":
            raise DeviceRefused("it is read-only")
        if _size(number) == 0:
            raise DeviceRefused("it has no size")
        if _text(whole / "queue/zoned") not in ("", "none"):
            raise DeviceRefused("it is a zoned device")
        if _block(number) > _LARGEST_BLOCK:
            raise DeviceRefused(f"its blocks are of {_block(number)} bytes, and may have {_LARGEST_BLOCK}")
        loops = [loop for loop, over in loopdev.backings().items() if _is_number(Path(over.path), number)]
        if loops:
            raise DeviceRefused(f"the loop device {loops[0]} is over it")
        try:
            # Exclusively: that fails for what is mounted, or is a part of something (open(2), O_EXCL). Not for writing:
            # udev inspects a device again when a writer has closed it.
            os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
        except OSError as error:
            why = error.strerror
            if error.errno == errno.EBUSY:
                holders = ", ".join(sorted(_names(home / "holders")))
                why = f"it is mounted, or a part of something{': ' + holders if holders else ''}"
            raise DeviceRefused(str(why)) from error

    def _ours(self, number: str, whole: Path) -> str:
        """What a device is of VirtMan's, if it is."""
        with self._group.lock:
            volumes = self._group.recorded()
        if volume := next((path for path in volumes if _is_number(path, number)), None):
            return f"the cache volume {volume}"
        for below in _below(whole):
            if (name := _text(below / "dm/name")).startswith(_OURS):
                return f"the map {name}"
        backing = _text(whole / "loop/backing_file")
        if any(Path(backing).is_relative_to(folder) for folder in udevrules.folders()):
            return f"the file {backing}"
        if _text(whole / "device/vendor").startswith(MAKER) and _text(whole / "device/model").startswith(MODEL):
            return "a parent's disk of an image"
        return ""

    def _device(self, name: str) -> str | None:
        """The number of the device itself; None if its user was cut off, or it is not attached."""
        return next(iter(_parts(_RAW + name)), None) if _parts(_TOP + name) else None

    def _swap(self, name: str, sectors: int, *first: str) -> None:
        """Have a device, of so many sectors, used by way of ``first``, if given, and by itself."""
        try:
            devmapper.reload(_TOP + name, [_multipath(sectors, *first, _of(_RAW, name))], timeout=SWAP_LIMIT)
        except DriverError:
            # A wait that is cut off leaves it failing what no path takes (Linux: multipath_presuspend).
            with self._messages:
                devmapper.message(_TOP + name, multipath.HOLDS)
                devmapper.drop_loaded(_TOP + name)
            raise

    def _bring_back(self, name: str) -> None:
        """Have the map use the device, and hold what no path takes, also if a process died in ``_pass_errors``."""
        with self._messages:
            top, raw = _TOP + name, _of(_RAW, name)
            devmapper.drop_loaded(top)
            if raw not in _parts(top):
                return
            if raw in multipath.state(top).failed:
                multipath.reinstate(top, [raw])
            devmapper.message(top, multipath.HOLDS)

    def _pass_errors(self, name: str) -> None:
        """If no path takes anything any more, fail what is held, and try the device again for what comes next."""
        with self._messages:
            top, raw = _TOP + name, _of(_RAW, name)
            parts = _parts(top)
            if raw not in parts or parts - multipath.state(top).failed or multipath.HOLDS not in devmapper.table(top):
                return  # a path works, or the users were cut off
            log.warning("%s: the device %s fails requests", top, self._device(name))
            devmapper.message(top, multipath.FAILS)
            multipath.reinstate(top, [raw])
            devmapper.message(top, multipath.HOLDS)

    def _cut(self, top: str) -> None:
        """Have the map fail all requests from now on."""
        with self._messages:
            devmapper.drop_loaded(top)
            parts = _parts(top)
            if not parts:
                return  # it was done before
            devmapper.message(top, multipath.FAILS)
            multipath.fail(top, sorted(parts))

    def _remove_top(self, name: str, *, force: bool) -> None:
        top = _TOP + name
        if not devmapper.openers(top) or not force:
            try:
                devmapper.remove(top)
            except CommandFailed as error:
                if not devmapper.openers(top):
                    raise
                if not force:
                    raise DeviceInUse(devmapper.map_path(top)) from error
            else:
                return
        try:
            devmapper.reload(top, [f"0 {devmapper.size(top) // SECTOR} error"], timeout=SWAP_LIMIT)
        except CommandTimedOut as error:
            what = f"requests that the storage of {top} has begun; it takes no more of them"
            raise NotReleased(what, SWAP_LIMIT) from error
        devmapper.rename(top, _GONE + name)

    # What is below

    def _make(self, name: str, number: str, sectors: int) -> bool:
        """A new bcache device that a volume reads for; False if there is no volume. Raises BadDisk if none takes it."""
        below = DEVICE + name
        with self._group.lock:
            if not self._group.may_run():
                return False
            HEADERS.mkdir(parents=True, exist_ok=True)
            backing.make_header(_header(name), _block(number))
            loop = loopdev.attach(_header(name), direct=False)
            data = f"{backing.START} {sectors} {_whole(number, sectors)}"
            devmapper.create(below, backing.table(loop, [data], sectors))
            bcachedev.register(below)
            self._group.settle()
            joined = self._group.join(below)
        if not joined:
            self._drop(name)
            return False
        disk = bcachedev.disk(below, cache_mode="writethrough", sequential_cutoff="0", io_error_limit="1")
        devmapper.create(_SPLIT + name, devmapper.pieces(0, sectors, disk, backing.GUARD // SECTOR, self._split))
        return True

    def _drop(self, name: str) -> None:
        """Remove what is below, whole or half made, and what names it in a volume."""
        below = DEVICE + name
        devmapper.remove(_SPLIT + name)
        if devmapper.exists(below):
            bcachedev.stop(below)
        with self._group.lock:
            devmapper.remove(below)
            loopdev.detach(_header(name))
            for file in matching(HEADERS, f"{name}.*"):
                file.unlink()
            self._group.settle()

    # What is told

    def _state(self, name: str) -> DeviceState:
        """Once bcache has seen an error of the device it is not trusted any more."""
        top, split, below = _TOP + name, _of(_SPLIT, name), DEVICE + name
        used = split in _parts(top) and split not in multipath.state(top).failed
        by_cache = used and bcachedev.set_of(below) is not None
        trusted = by_cache and _text(bcachedev.settings(below) / "io_errors") == "0"
        return DeviceState.CACHED if trusted else DeviceState.DIRECT

    def _described(self, name: str) -> CachedDevice:
        top, below = _TOP + name, DEVICE + name
        hits = misses = read = fetched = 0
        state = self._state(name)
        if state is DeviceState.CACHED:
            totals = bcachedev.settings(below) / "stats_total"
            hits, misses = (int(_text(totals / f"cache_{kind}") or 0) for kind in ("hits", "misses"))
            read, fetched = (_read(map_name) for map_name in (_SPLIT + name, below))
        return CachedDevice(
            device=name, path=str(devmapper.map_path(top)), size=devmapper.size(top), state=state, hits=hits,
            misses=misses, cache_bytes=max(0, read - fetched),
        )  # fmt: skip

    # Errors of devices

    def _watch(self) -> None:
        """Have a thread check for errors, as long as any device is attached."""
        with self._watching:
            if self._alarm is None:
                self._alarm = Alarm()
                Watch("device-watch", self._check_for_errors).start()

    def _check_for_errors(self) -> None:
        while True:
            with self._watching:
                alarm = self._alarm
                assert alarm is not None  # noqa: S101
                alarm.arm()
                tops = devmapper.names(_TOP)
                if not tops:
                    alarm.close()
                    self._alarm = None
                    return
            for top in tops:
                try:
                    self._pass_errors(top.removeprefix(_TOP))
                except (DriverError, OSError) as error:  # the map may be going
                    log.info("%s: %s", top, error)
            alarm.wait()


def _multipath(sectors: int, *numbers: str) -> str:
    """A table that sends to the first device, and to the next what that fails to do; what all fail is held."""
    return multipath.table(sectors, [[number] for number in numbers], holds=True)


def _linear(number: str) -> str:
    return f"0 {_size(number) // SECTOR} linear {number} 0"


def _of(prefix: str, name: str) -> str:
    """The number of a map, nothing if there is none."""
    return devmapper.number(devmapper.map_path(prefix + name)) if devmapper.exists(prefix + name) else ""


def _parts(name: str) -> set[str]:
    """The numbers of what a map lies over, if there is one, by its table and one that was loaded and not used yet."""
    if not devmapper.exists(name):
        return set()
    return {_text(link / "dev") for link in matching(bcachedev.folder(name) / "slaves", "*")}


def _whole(number: str, sectors: int) -> str:
    """A target that is a whole device.

    bcache counts what is dirty for each unit of what a device calls its best size of a request, also where nothing ever
    is: 64 MiB of memory for a volume of 1 TiB that says 64 KiB. A striped target with one stripe says its own (Linux:
    drivers/md/bcache/super.c, bcache_device_init; drivers/md/dm-stripe.c, stripe_io_hints). It is one target whatever
    the size, since a flush goes to each target.
    """
    chunk = _CHUNK // SECTOR
    while sectors % chunk:
        chunk //= 2
    return f"striped 1 {chunk} {number} 0" if chunk >= _SMALLEST_CHUNK // SECTOR else f"linear {number} 0"


def _header(name: str) -> Path:
    return HEADERS / f"{name}.header"


def _number(device: Path) -> str:
    """Raises DeviceRefused."""
    try:
        if stat.S_ISBLK(device.stat().st_mode):
            return devmapper.number(device)
    except OSError as error:
        raise DeviceRefused(error.strerror or str(error)) from error
    raise DeviceRefused("it is no block device")


def _is_number(path: Path, number: str) -> bool:
    try:
        return stat.S_ISBLK(path.stat().st_mode) and devmapper.number(path) == number
    except OSError:
        return False


def _home(number: str) -> Path:
    return Path("/sys/dev/block", number).resolve()


def _size(number: str) -> int:
    """Bytes. A device whose storage is silent would not be opened."""
    return int(_text(_home(number) / "size") or 0) * SECTOR


def _block(number: str) -> int:
    """Bytes of the smallest request."""
    home = _home(number)
    queue = home / "queue" if (home / "queue").exists() else home.parent / "queue"
    return int(_text(queue / "logical_block_size") or SECTOR)


def _read(name: str) -> int:
    """Bytes read from a map until now."""
    return int(devmapper.counted(name)[2]) * SECTOR


def _below(home: Path) -> list[Path]:
    """A device and all that it is made of."""
    return [home, *(lower for link in matching(home / "slaves", "*") for lower in _below(link.resolve()))]


def _names(folder: Path) -> set[str]:
    return {link.name for link in matching(folder, "*")}


def _text(file: Path) -> str:
    """What a file in /sys says, nothing if it is not there."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
