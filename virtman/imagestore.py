"""The images this host has published: whole raw files, named by their digest.

A raw or qcow2 file is copied in, so that nobody can change an image once it is published, and its digest is computed
over the copy.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from drivers.base import Image
from drivers.errors import CommandFailed
from drivers.host.command import run
from drivers.host.durable import sync
from virtman.errors import BadImageFile, NoRoom
from virtman.hostfiles import told
from virtman.imagefile import Source, last_line

Progress = Callable[[str, int, int], None]
"""Called with what is done ("copy" or "digest"), bytes done and bytes in all."""

CHUNK = 4 << 20
RESERVE = 64 << 20
"""Bytes left free on the file system of the store."""
COPY_TIMEOUT = 6 * 3600.0


class ImageStore:
    """The folder of published images."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, image: Image) -> Path:
        """Where the image's content is."""
        return self._folder / f"{image.key}.raw"

    def clean(self) -> None:
        """Remove what interrupted imports left. Call when none runs."""
        for torn in self._folder.glob(".import-*"):
            torn.unlink()

    def add(self, name: str, source: Source, progress: Progress) -> Image:
        """Copy a file in. The same content again costs the copy, and keeps one file.

        Raises NoRoom, BadImageFile, HostTrouble.
        """
        with told(f"the content of an image in {self._folder}"):
            return self._add(name, source, progress)

    def _add(self, name: str, source: Source, progress: Progress) -> Image:
        self._require_room(source)
        temporary = self._folder / f".import-{name}.raw"
        try:
            _copy(source, temporary, progress)
            size = temporary.stat().st_size
            image = Image(name, size, f"sha256:{_digest(temporary, size, progress)}")
            temporary.rename(self.path(image))
            sync(self._folder)
        finally:
            temporary.unlink(missing_ok=True)
        return image

    def remove(self, key: str) -> int:
        """Delete an image's content. Returns the bytes of disk space freed. Raises HostTrouble."""
        path = self._folder / f"{key}.raw"
        with told(f"removing {path}"):
            try:
                freed = path.stat().st_blocks * 512
                path.unlink()
            except FileNotFoundError:
                return 0
            sync(self._folder)
            return freed

    def size(self, key: str) -> int:
        """The bytes of disk space that ``remove`` would free."""
        try:
            return (self._folder / f"{key}.raw").stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    def keys(self) -> Iterator[str]:
        """Keys of the images that are here."""
        return (path.stem for path in self._folder.glob("[!.]*.raw"))

    def _require_room(self, source: Source) -> None:
        free = shutil.disk_usage(self._folder).free
        if source.needed + RESERVE > free:
            raise NoRoom(
                f"{source.path} takes {source.needed >> 20} MiB in {self._folder}, which has {free >> 20} MiB free"
                f" ({RESERVE >> 20} MiB are kept free)"
            )


def _copy(source: Source, target: Path, progress: Progress) -> None:
    def on_line(line: str) -> None:
        # qemu-img -p prints "    (12.34/100%)"
        percent = line.strip().strip("(").partition("/")[0]
        if percent.replace(".", "", 1).isdigit():
            progress("copy", int(source.size * float(percent) / 100), source.size)

    argv = ["qemu-img", "convert", "-p", "-f", source.format, "-O", "raw", str(source.path), str(target)]
    try:
        run(argv, timeout=COPY_TIMEOUT, on_line=on_line)
    except CommandFailed as error:
        if "No space left" in error.stderr:
            raise NoRoom(f"no space left in {target.parent} while copying {source.path}") from error
        raise BadImageFile(f"cannot copy {source.path}: {last_line(error.stderr)}") from error


def _digest(path: Path, size: int, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress("digest", done, size)
        os.fsync(file.fileno())
    return digest.hexdigest()
