"""The cache group of a host: volumes, and what is read through them.

A *member* is a bcache backing device, named by its map: an image's, which is read-only and may join and leave a volume
while it is read; or that of a device which a VM writes to. Such a device joins before anybody uses it, and once: a read
that misses just when the device joins could be kept although a write has overtaken the read, since bcache does not
track what began before (Linux: drivers/md/bcache/request.c, detached_dev_do_request). A member may leave at any time.

``volumes.json`` says what is wanted of each volume; the kernel says what is so. A step brings one volume to what is
wanted. Any error is one path: members leave, the volume stops, is formatted anew, and members join.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from drivers.cache import onefetch
from drivers.cache.cachefiles import file_bytes
from drivers.cache.cachevolumes import Volumes, attached, failed, running, size_of
from drivers.cachemodels import Volume, VolumeState
from drivers.door import door
from drivers.errors import BadDisk, BadVolume, DriverError, VolumeInUse
from drivers.host.durable import write_atomically
from drivers.kernel import bcachedev, devmapper
from drivers.needs import DEVICE_MAPPER, DMSETUP, LOOP, LOSETUP, MODPROBE, UDEVADM, Needs, Tool

log = logging.getLogger(__name__)

IMAGE, DEVICE = "virtman-cacheof-", "virtman-volumeof-"
"""How the maps of members are called: of an image, and of a device."""

WANTED, MISSING, BROKEN, LEAVING = "wanted", "missing", "broken", "leaving"
"""States of a volume in the record: to run while there are members; the same, but the path does not lead to the volume;
to be formatted anew; to be removed."""


@dataclass(frozen=True)
class Entry:
    """A volume in the record. ``number``: empty until the volume is made; ``why``: the last error, unless mended."""

    number: str = ""
    size: int = 0
    state: str = WANTED
    why: str = ""


@door
class Group:
    """See ``CacheGroup``. The volumes are in ``folder/volumes.json``; until others are named there is ``folder/pool``.

    ``lock`` is held while members are made or removed, and here: no volume stops while a member joins it.
    """

    needs = Needs(
        tools=(Tool("make-bcache", "bcache-tools"), DMSETUP, LOSETUP, MODPROBE, UDEVADM),
        modules=("bcache", *onefetch.MODULES, "dm_round_robin"),
        nodes=(DEVICE_MAPPER, LOOP),
        root=True,
    )

    def __init__(self, folder: Path, volumes: Volumes) -> None:
        self._record, self._default = folder / "volumes.json", folder / "pool"
        self._volumes = volumes
        self._entries: dict[Path, Entry] | None = None
        self.lock = threading.Lock()

    def recorded(self) -> dict[Path, Entry]:
        """The volumes by path. A change counts also if a full disk did not take the change. Raises OSError."""
        if self._entries is None:
            self._entries = self._read()
        return self._entries

    def _read(self) -> dict[Path, Entry]:
        try:
            return {Path(path): Entry(**row) for path, row in json.loads(self._record.read_text()).items()}
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, AttributeError) as error:
            log.error("%s is damaged, and the cache begins anew in %s: %s", self._record, self._default, error)
        return {self._default: Entry()}

    def volumes(self) -> list[Volume]:
        """See ``CacheGroup``: what the record and the kernel say."""
        return [_described(path, entry) for path, entry in self.recorded().items()]

    def file_bytes(self) -> int:
        """Disk space that the volumes in files take. Raises OSError."""
        return sum(file_bytes(path) for path in self.recorded() if path.is_file())

    def add_volume(self, path: Path) -> Volume:
        """See ``CacheGroup``. Images that have no volume join it. Raises BadVolume, NoSpace, CommandFailed."""
        with self.lock:
            if self._entry(path).state == LEAVING:
                self._step(path)
            if path not in (known := self.recorded()):
                number = self._volumes.make(path, [entry.number for entry in known.values()])
                self._set(path, number=number, size=size_of(path))
            with contextlib.suppress(DriverError, OSError):  # the answer has the reason
                self._step(path)
                self._join_images()
            return _described(path, self._entry(path))

    def remove_volume(self, path: Path) -> bool:
        """See ``CacheGroup``. A volume that cannot be released takes no more members, and ``tend_volume`` goes on.

        Raises VolumeInUse, NotReleased, CommandFailed, DiskFull.
        """
        with self.lock:
            if path not in self.recorded():
                return False
            _check_only_ours(path, self._entry(path).number)
            with contextlib.suppress(OSError):  # the removal may be what makes room on a full disk
                self._set(path, state=LEAVING)
            self._step(path)
            return True

    def tend_volume(self, path: Path) -> None:
        """See ``CacheGroup``. Raises BadVolume if the path does not lead to the volume, or nothing answers; BadDisk if
        bcache refuses the volume, or an image; VolumeInUse, NotReleased, NoSpace, CommandFailed.
        """
        with self.lock:
            self._step(path)
            self._join_images()

    # What follows wants the lock

    def settle(self) -> None:
        """Take the next steps of all volumes without an error, or of all that are to stop. Errors are recorded."""
        for path, entry in self.recorded().items():
            if not entry.why or not _has_members():
                with contextlib.suppress(DriverError, OSError):
                    self._step(path)

    def may_run(self) -> bool:
        """Whether there is a volume to join, once there are members."""
        return any(running(e.number) or not e.why for e in self.recorded().values() if e.state == WANTED)

    def join(self, below: str) -> bool:
        """Whether a member has a volume. A member without one is attached to that with the most room for each member.

        A volume that has given all its numbers away is broken from then on. Raises BadDisk with bcache's reasons if
        there are volumes, and none takes the member; CommandTimedOut.
        """
        said: list[str] = []
        for path, home in self._by_room() if bcachedev.settings(below).exists() else []:
            refusal = [] if bcachedev.set_of(below) else bcachedev.attach(below, home)
            if bcachedev.set_of(below):
                return True
            said += refusal or ["bcache gives no reason"]
            if bcachedev.is_full(refusal):
                self._set(path, state=BROKEN, why="it takes no more members until it is emptied")
        if said:
            raise BadDisk(f"no cache volume takes {below}: {'; '.join(said)}")
        return False

    def _join_images(self) -> None:
        """Have all images join a volume that have none. Raises the first error after all were tried."""
        errors = []
        for below in [name for name in sorted(devmapper.names(IMAGE)) if bcachedev.set_of(name) is None]:
            try:
                self.join(below)
            except (DriverError, OSError) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _by_room(self) -> list[tuple[Path, Path]]:
        """The volumes that run and are wanted, with their sets, the best for one more member first."""
        wanted = [(path, entry) for path, entry in self.recorded().items() if entry.state == WANTED]
        found = [(path, home, entry.size) for path, entry in wanted if (home := running(entry.number))]
        found.sort(key=lambda each: -each[2] / (1 + len(bcachedev.attached(each[1]))))
        return [(path, home) for path, home, _ in found]

    # The steps of a volume

    def _step(self, path: Path) -> None:
        """Bring a volume to what is wanted of it. Record the error, or that there is none."""
        failure = None
        try:
            if (entry := self.recorded().get(path)) is not None:
                self._bring(path, entry)
        except (DriverError, OSError) as error:
            failure = error
        if (entry := self.recorded().get(path)) is not None:
            state = {BadVolume: MISSING, BadDisk: BROKEN}.get(type(failure), WANTED)
            kept = entry.state if entry.state in (BROKEN, LEAVING) else state
            self._set(path, state=kept, why=str(failure or ""))
        if failure is not None:
            raise failure

    def _bring(self, path: Path, entry: Entry) -> None:
        number = entry.number
        if entry.state == LEAVING:
            self._release(path, number)
            erased = number and self._volumes.erase(path, number)
            self._write({other: entry for other, entry in self.recorded().items() if other != path})
            log.info("cache volume %s is removed%s", path, "" if erased else ", but what is there stays as it is")
            return
        if path == self._default and not path.exists() and not running(number) and not failed(number):
            number = ""  # the file was lost, and is made again
        elif entry.state == BROKEN or failed(number):
            self._empty(path, number)
        if _has_members():
            self._start(path, number)
        elif number and not _strangers(number):
            self._volumes.stop(path, number)
            self._volumes.check_mark(path, number)

    def _start(self, path: Path, number: str) -> None:
        if not number:
            number = self._volumes.number(path) or self._volumes.make(path, [])
            self._set(path, number=number, size=size_of(path), state=WANTED)
        self._volumes.start(path, number)
        if home := running(number):
            bcachedev.end_youth(home)

    def _empty(self, path: Path, number: str) -> None:
        """Have a volume begin empty."""
        self._set(path, state=BROKEN)
        if attached(number):
            self._volumes.check_mark(path, number)  # before members leave
        self._release(path, number)
        self._volumes.check_mark(path, number)
        log.warning("cache volume %s begins empty: %s", path, self._entry(path).why or "it has failed")
        self._volumes.format(path, number)
        self._set(path, state=WANTED)

    def _release(self, path: Path, number: str) -> None:
        """Let the members of a volume go on without it, images on others if there are, and stop it.

        Raises VolumeInUse, before anything is changed, if a foreign device is attached.
        """
        _check_only_ours(path, number)
        for below in attached(number):
            log.info("%s leaves the cache volume %s", below, path)
            bcachedev.detach(below)
        with contextlib.suppress(DriverError, OSError):  # it is tried again in the end
            self._join_images()
        self._volumes.stop(path, number)

    # The record

    def _entry(self, path: Path) -> Entry:
        return self.recorded().get(path, Entry())

    def _set(self, path: Path, **changes: Any) -> None:
        before = self.recorded()
        after = {**before, path: replace(self._entry(path), **changes)}
        if after != before:
            self._write(after)

    def _write(self, volumes: dict[Path, Entry]) -> None:
        self._entries = volumes
        rows = {str(path): asdict(entry) for path, entry in volumes.items()}
        write_atomically(self._record, json.dumps(rows).encode())


def _described(path: Path, entry: Entry) -> Volume:
    home = running(entry.number)
    members = bcachedev.attached(home) if home else []
    if home:
        state = VolumeState.RUNNING
    elif entry.state == BROKEN or failed(entry.number):
        state = VolumeState.FAILED
    else:
        state = VolumeState.MISSING if entry.state == MISSING else VolumeState.IDLE
    return Volume(
        path=str(path), size=0 if state is VolumeState.MISSING else entry.size, state=state,
        images=[below.removeprefix(IMAGE).rpartition("-")[0] for below in members if below.startswith(IMAGE)],
        devices=[below.removeprefix(DEVICE) for below in members if below.startswith(DEVICE)], trouble=entry.why,
    )  # fmt: skip


def _has_members() -> bool:
    return bool(devmapper.names(IMAGE) or devmapper.names(DEVICE))


def _strangers(number: str) -> list[str]:
    """The foreign devices that are attached to a volume."""
    return [name for name in attached(number) if not name.startswith((IMAGE, DEVICE))]


def _check_only_ours(path: Path, number: str) -> None:
    if strangers := _strangers(number):
        raise VolumeInUse(path, strangers)
