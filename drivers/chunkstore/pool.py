"""The volumes of the chunk store's pool, as people add and remove them: files, partitions and disks.

``volumes.json`` says which volumes there are to be, and how large each may get. The process is told so at each start.
It finds what a volume holds by itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
from pathlib import Path

from drivers.base import Place
from drivers.cachemodels import Volume, VolumeState
from drivers.chunkstore.process import Process
from drivers.errors import BadVolume, DriverError
from drivers.host import blockdev, emptydisk
from drivers.host.durable import write_atomically
from drivers.host.space import Room

log = logging.getLogger(__name__)

SHARE, LARGEST = 2, 256 << 30
"""Unless the administrator says otherwise, a file may get as large as one half of its file system, at most LARGEST
bytes. A chunk of 64 KiB takes about 28 bytes of memory, so that is 110 MiB of memory."""


MARK = b"virtman chunks 1"
"""What each volume begins with (chunkd/src/pool/member.rs)."""


class ChunkPool:
    """See ``CacheGroup``. Until others are named there is one volume: the file ``pool`` in the state folder."""

    def __init__(self, place: Place, process: Process) -> None:
        folder = place.state / "chunkstore"
        self._record, self._default = folder / "volumes.json", folder / "pool"
        self._room, self._limit = Room(place.state, place.reserve), place.cache_limit
        self._process = process
        self._lock = threading.Lock()
        self._why: dict[Path, str] = {}
        """Why the last step of a volume failed."""

    def volumes(self) -> list[Volume]:
        return [self._described(path, limit) for path, limit in self._recorded().items()]

    def tend_volume(self, path: Path) -> None:
        limit = self._recorded().get(path)
        if limit is not None:
            self._tell(path, limit)

    def add_volume(self, path: Path) -> Volume:
        with self._lock:
            known = self._recorded()
            if path not in known:
                self._process.ensure()
                _prepare(path)
                limit = self._limit_of(path)
                self._tell(path, limit, make=True)
                self._write({**known, path: limit})
                known = self._recorded()
        return self._described(path, known[path])

    def remove_volume(self, path: Path) -> bool:
        with self._lock:
            known = self._recorded()
            if path not in known:
                return False
            self._process.ensure()
            self._process.call("remove-member", {"path": str(path)})
            self._write({other: limit for other, limit in known.items() if other != path})
            _erase(path)
            return True

    def tell(self) -> None:
        """Tell the process of all volumes. One that fails keeps nobody from reading: ``tend_volume`` tries again."""
        for path, limit in self._recorded().items():
            with contextlib.suppress(BadVolume):
                self._tell(path, limit)

    def _tell(self, path: Path, limit: int, *, make: bool = False) -> None:
        """``make``: a file that is not there. The first one is made whenever it is missing. Raises BadVolume."""
        try:
            member = {"path": str(path), "limit": limit, "reserve": self._room.reserve(path.parent)}
            self._process.call("add-member", {**member, "make": make or path == self._default})
        except (DriverError, OSError) as error:
            if (why := str(error)) != self._why.get(path):
                log.warning("volume %s of the cache is not used: %s", path, why)
            self._why[path] = why
            raise BadVolume(path, why) from error
        self._why.pop(path, None)

    def _described(self, path: Path, limit: int) -> Volume:
        why = self._why.get(path, "")
        state = VolumeState.RUNNING if not why else VolumeState.FAILED if path.exists() else VolumeState.MISSING
        return Volume(path=str(path), size=limit, state=state, images=[], trouble=why)

    def _limit_of(self, path: Path) -> int:
        """The most bytes of a volume. Raises OSError."""
        if path.is_block_device():
            with path.open("rb", buffering=0) as disk:
                return blockdev.size(disk.fileno())
        return self._limit or min(LARGEST, shutil.disk_usage(path.parent).total // SHARE)

    def _limit_now(self, path: Path, recorded: int) -> int:
        """Files follow what the administrator says now, and the first one its file system. Raises OSError."""
        if path == self._default:
            return self._limit_of(path)
        return recorded if self._limit is None or path.is_block_device() else self._limit

    def _recorded(self) -> dict[Path, int]:
        """The volumes, with the most bytes of each. Raises OSError."""
        try:
            known = {Path(path): int(limit) for path, limit in json.loads(self._record.read_text()).items()}
            return {path: self._limit_now(path, limit) for path, limit in known.items()}
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, AttributeError) as error:
            log.error("%s is damaged, and the pool begins anew in %s: %s", self._record, self._default, error)
        return {self._default: self._limit_of(self._default)}

    def _write(self, volumes: dict[Path, int]) -> None:
        write_atomically(self._record, json.dumps({str(path): limit for path, limit in volumes.items()}).encode())


def _prepare(path: Path) -> None:
    """Mark a disk that nobody needs. The process makes a file, or refuses one that holds something else.

    Raises BadVolume, CommandFailed, ToolMissing.
    """
    try:
        why = _objection(path)
        if not why and path.is_block_device():
            emptydisk.write(path, MARK)
    except OSError as error:
        raise BadVolume(path, error.strerror or str(error)) from error
    if why:
        raise BadVolume(path, why)


def _objection(path: Path) -> str:
    """Why a volume must not be made there; empty if it can be. Raises OSError, CommandFailed, ToolMissing."""
    if not path.is_absolute():
        return "it must be an absolute path"
    if path.is_block_device():
        return emptydisk.objection(path, marked=_is_marked(path))
    if path.exists():
        return "" if path.is_file() and _is_marked(path) else "something else is there; name a file that does not exist"
    return "" if path.parent.is_dir() else "there is no such file or device, nor a folder to make a file in"


def _is_marked(path: Path) -> bool:
    with path.open("rb", buffering=0) as file:
        return file.read(len(MARK)) == MARK


def _erase(path: Path) -> None:
    """Delete the file of a volume that is used no more, or free its disk. What has no mark is left alone."""
    with contextlib.suppress(OSError):
        if _is_marked(path):
            path.unlink() if path.is_file() else emptydisk.write(path, bytes(emptydisk.BEGINNING))
