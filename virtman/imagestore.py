"""The images this host has published: whole raw files, named by their digest.

A raw or qcow2 file is copied in, so that nobody can change an image once it is published, and its digest is computed
over the copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivers.base import Image
from drivers.command import run
from drivers.durable import sync
from drivers.errors import CommandFailed
from virtman.errors import BadImageFile, NoRoom

Progress = Callable[[str, int, int], None]
"""Called with what is done ("copy" or "digest"), bytes done and bytes in all."""

CHUNK = 4 << 20
QCOW2_MAGIC = b"QFI\xfb"
RESERVE = 64 << 20
"""Bytes left free on the file system of the store."""
LEAKS_ONLY = 3
"""qemu-img check: exit code for a whole image that merely wastes space."""
COPY_TIMEOUT = 6 * 3600.0


@dataclass(frozen=True)
class Source:
    """A file to publish: ``size`` of the disk in it; ``needed``: disk space it takes at least. Both in bytes."""

    path: Path
    format: str
    size: int
    needed: int


def inspect(path: Path) -> Source:
    """Look at a file to publish. Raises BadImageFile.

    Only the magic number decides between raw and qcow2; a qcow2 that refers to other files is refused, since it would
    publish whatever the agent may read.
    """
    if not path.is_absolute():
        raise BadImageFile(f"{str(path)!r} is not an absolute path")
    image_format = "qcow2" if _magic(path) == QCOW2_MAGIC else "raw"
    info = _info(path, image_format)
    _refuse_references(path, info)
    size = int(info["virtual-size"])
    if size == 0:
        raise BadImageFile(f"{path} is empty")
    if image_format == "qcow2":
        _check_qcow2(path)
    return Source(path, image_format, size, min(size, int(info["actual-size"])))


def _magic(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise BadImageFile(f"{path} is not a file")
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise BadImageFile(f"cannot read {path}: {error.strerror}") from error


def _info(path: Path, image_format: str) -> dict[str, Any]:
    try:
        answer = run(["qemu-img", "info", "--output=json", "-f", image_format, str(path)])
    except CommandFailed as error:
        raise BadImageFile(f"{path} is not a whole {image_format} image: {_last_line(error.stderr)}") from error
    info: dict[str, Any] = json.loads(answer.stdout)
    return info


def _refuse_references(path: Path, info: dict[str, Any]) -> None:
    specific = info.get("format-specific", {}).get("data", {})
    for where, what in ((info, "backing-filename"), (specific, "data-file")):
        if where.get(what):
            raise BadImageFile(f"{path} refers to another file ({what}); flatten it with qemu-img convert first")
    if info.get("encrypted"):
        raise BadImageFile(f"{path} is encrypted; decrypt it with qemu-img convert first")


def _check_qcow2(path: Path) -> None:
    """A qcow2 cut off at its end reads as zeros there, without an error: find that before anything is copied."""
    try:
        run(["qemu-img", "check", "-f", "qcow2", str(path)], timeout=COPY_TIMEOUT)
    except CommandFailed as error:
        if error.code == LEAKS_ONLY:
            return
        raise BadImageFile(f"{path} is a damaged qcow2 image: {_last_line(error.stderr or error.stdout)}") from error


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no reason given"


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
        """Copy a file in. The same content again costs the copy, and keeps one file. Raises NoRoom, BadImageFile."""
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
        """Delete an image's content. Returns the bytes of disk space freed."""
        path = self._folder / f"{key}.raw"
        try:
            freed = path.stat().st_blocks * 512
            path.unlink()
        except FileNotFoundError:
            return 0
        sync(self._folder)
        return freed

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
        raise BadImageFile(f"cannot copy {source.path}: {_last_line(error.stderr)}") from error


def _digest(path: Path, size: int, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress("digest", done, size)
        os.fsync(file.fileno())
    return digest.hexdigest()
