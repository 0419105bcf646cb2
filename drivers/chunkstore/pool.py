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
from drivers.chunkstore.control import Control
from drivers.errors import BadVolume, DriverError
from drivers.host.durable import write_atomically
from drivers.host.space import Room

log = logging.getLogger(__name__)

SHARE, LARGEST = 2, 256 << 30
"""Unless the administrator says otherwise, a file may get as large as one half of its file system, at most LARGEST
bytes. A chunk of 64 KiB takes about 28 bytes of memory, so that is 110 MiB of memory."""


class ChunkPool:
    """See ``CacheGroup``. Until others are named there is one volume: the file ``pool`` in the state folder."""

    def __init__(self, place: Place, control: Control) -> None:
        folder = place.state / "chunkstore"
        self._record, self._default = folder / "volumes.json", folder / "pool"
        self._room, self._limit = Room(place.state, place.reserve), place.cache_limit
        self._control = control
        self._lock = threading.Lock()
        self._why: dict[Path, str] = {}
        """Why the last step of a volume failed."""

    def volumes(self) -> list[Volume]:
        with contextlib.suppress(DriverError):
            self.tell()
        return [self._described(path, limit) for path, limit in self._recorded().items()]

    def tend_volume(self, path: Path) -> None:
        limit = self._recorded().get(path)
        if limit is not None:
            self._tell(path, limit)

    def add_volume(self, path: Path) -> Volume:
        with self._lock:
            known = self._recorded()
            if path not in known:
                limit = self._limit_of(path)
                self._tell(path, limit)
                self._write({**known, path: limit})
                known = self._recorded()
        return self._described(path, known[path])

    def remove_volume(self, path: Path) -> bool:
        with self._lock:
            known = self._recorded()
            if path not in known:
                return False
            self._control.call("remove-member", {"path": str(path)})
            self._write({other: limit for other, limit in known.items() if other != path})
            if path.is_file():
                path.unlink()
            return True

    def tell(self) -> None:
        """Tell the process of all volumes. Raises the first error, after all were tried."""
        errors = []
        for path, limit in self._recorded().items():
            try:
                self._tell(path, limit)
            except DriverError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _tell(self, path: Path, limit: int) -> None:
        """Raises BadVolume, StoreDown."""
        try:
            reserve = self._room.reserve(path.parent)
            self._control.call("add-member", {"path": str(path), "limit": limit, "reserve": reserve})
        except (DriverError, OSError) as error:
            self._why[path] = str(error)
            raise BadVolume(path, str(error)) from error
        self._why.pop(path, None)

    def _described(self, path: Path, limit: int) -> Volume:
        why = self._why.get(path, "")
        state = VolumeState.FAILED if why else VolumeState.RUNNING
        return Volume(path=str(path), size=limit, state=state, images=[], trouble=why)

    def _limit_of(self, path: Path) -> int:
        """The most bytes of a volume. Raises OSError."""
        if path.is_block_device():
            return 1 << 62
        return self._limit or min(LARGEST, shutil.disk_usage(path.parent).total // SHARE)

    def _recorded(self) -> dict[Path, int]:
        """The volumes, with the most bytes of each. Raises OSError."""
        try:
            return {Path(path): int(limit) for path, limit in json.loads(self._record.read_text()).items()}
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, AttributeError) as error:
            log.error("%s is damaged, and the pool begins anew in %s: %s", self._record, self._default, error)
        return {self._default: self._limit_of(self._default)}

    def _write(self, volumes: dict[Path, int]) -> None:
        write_atomically(self._record, json.dumps({str(path): limit for path, limit in volumes.items()}).encode())
