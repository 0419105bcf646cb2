"""Names in caches: files begin with the key of the content that they hold, maps with the name of the image."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from drivers.base import Device, Image
from drivers.digests import LONGEST_KEY
from drivers.errors import BadDevice, BadDisk, BadName, DriverError, InUse
from drivers.host.folders import matching
from drivers.kernel import loopdev
from drivers.kernel.devmapper import SECTOR
from drivers.names import checked

log = logging.getLogger(__name__)

_KEY = re.compile(rf"[0-9A-Za-z]{{1,{LONGEST_KEY}}}", re.ASCII)


class Files:
    """What a cache in the kernel keeps in files of one folder, which it has open by loop devices."""

    def __init__(self, folder: Path, *kinds: str) -> None:
        """Make the folder. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._kinds = folder, kinds

    def of(self, image: Image, kind: str) -> Path:
        return file_of(self._folder, image, kind)

    def keys(self) -> frozenset[str]:
        """Keys of the images with a file."""
        return frozenset(map(key_of, self._all("*")))

    def size(self, key: str) -> int:
        """Disk space that the files of a key take. Raises BadName."""
        return sum(map(file_bytes, self._all(checked_key(key))))

    def remove(self, key: str) -> int:
        """Delete the files of a key. Returns the disk space freed. Raises BadName; InUse if one is open."""
        freed, files = self.size(key), self._all(key)
        for file in files:
            if loopdev.device_of(file):
                raise InUse(file)
        for file in files:
            file.unlink()
        return freed

    def _all(self, key: str) -> list[Path]:
        return [path for kind in self._kinds for path in matching(self._folder, f"{key}-*.{kind}")]


@contextmanager
def undone_after_error(image: Image, close: Callable[[Image], None]) -> Iterator[None]:
    """After an error ``close`` what a failed opening has made. The first error is the one to raise."""
    try:
        yield
    except (DriverError, OSError):
        try:
            close(image)
        except (DriverError, OSError) as error:
            log.error("image %s: removing a half made cache failed too: %s", image.name, error)
        raise


def kernel_base(image: Image, base: Device) -> Path:
    """The kernel's device below a cache. Raises BadDevice; BadDisk if its size is no multiple of 512."""
    if base.path is None:
        raise BadDevice(f"image {image.name}: what is below the cache is no kernel device")
    if image.size % SECTOR or not image.size:
        raise BadDisk(f"image {image.name}: its size {image.size} is not a multiple of {SECTOR}")
    return base.path


def checked_key(key: str) -> str:
    """The key, if it can be a part of a file's name. Raises BadName."""
    if not _KEY.fullmatch(key):
        raise BadName(key)
    return key


def file_of(folder: Path, image: Image, kind: str) -> Path:
    """An image's file of a kind. One content under two names has two: each has a user of its own. Raises BadName."""
    return folder / f"{checked_key(image.key)}-{checked(image.name)}.{kind}"


def key_of(path: Path) -> str:
    """The key that a file is named after."""
    return path.name.partition("-")[0]


def label(image: Image) -> str:
    """What the maps of an image's cache are called, after a prefix of at most 47 bytes (Linux: DM_NAME_LEN is 128).

    Raises BadName.
    """
    return f"{checked(image.name)}-{checked_key(image.key)[:16]}"


def file_bytes(path: Path) -> int:
    """Disk space the file takes, 0 if there is none."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
