"""A file to publish: a whole raw or qcow2 disk, else refused with what to do about it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drivers.base import BlockNode
from drivers.errors import CommandFailed
from drivers.host.command import run
from drivers.host.space import Room
from virtman.convert import QCOW2, RAW, Content, Progress, last_line
from virtman.errors import BadImageFile
from virtman.fdpassing import Passed, check_readable, mine, opened

Base = Callable[[], BlockNode]
"""Called at most once, for the node that has what is below an overlay."""

QCOW2_MAGIC = b"QFI\xfb"
_BASE_AT, _BASE_BYTES = 8, 12
"""Where the header of a qcow2 file says what is below it: an offset and a length, 0 for nothing (QEMU: qcow2.txt)."""
LEAKS_ONLY = 3
"""qemu-img check: exit code for a whole image that merely wastes space."""
CHECK_TIMEOUT = 6 * 3600.0

DISKS = {
    "version 1 qcow": ((0, QCOW2_MAGIC + b"\0\0\0\1"),),
    "QED": ((0, b"QED\0"),),
    "Parallels": ((0, b"WithoutFreeSpace"), (0, b"WithouFreSpacExt")),
    "Bochs": ((0, b"Bochs Virtual HD Image"),),
    "VMDK": ((0, b"KDMV"), (0, b"COWD"), (0, b"# Disk DescriptorFile")),
    "VDI": ((64, b"\x7f\x10\xda\xbe"),),
    "VHDX": ((0, b"vhdxfile"),),
    "VHD": ((0, b"conectix"),),
}
"""Where other formats of disks have which bytes (QEMU: block/qcow.c, qed.h, parallels.c, bochs.c, vmdk.c, vdi.c,
vhdx.h, vpc.c). As raw none boots. qemu-img could tell them apart, too, but opens what a header names to do that."""

_SKIPPABLE = tuple(bytes((0x50 + number,)) + b"\x2a\x4d\x18" for number in range(16))
"""Zstandard's frames that hold no data, with which pzstd begins its files (RFC 8878, 3.1.2)."""

PACKED = {
    "gzip": ((b"\x1f\x8b\x08",), ("gzip", "--decompress", "--stdout"), ".gz"),
    "compress": ((b"\x1f\x9d",), ("gzip", "--decompress", "--stdout"), ".Z"),
    "xz": ((b"\xfd7zXZ\0",), ("xz", "--decompress", "--stdout"), ".xz"),
    "Zstandard": ((b"\x28\xb5\x2f\xfd", *_SKIPPABLE), ("zstd", "--decompress", "--stdout"), ".zst"),
    "LZ4": ((b"\x04\x22\x4d\x18", b"\x02\x21\x4c\x18"), ("lz4", "--decompress", "--stdout"), ".lz4"),
    "lzip": ((b"LZIP\1",), ("lzip", "--decompress", "--stdout"), ".lz"),
    "lzop": ((b"\x89LZO\0\r\n\x1a\n",), ("lzop", "--decompress", "--stdout"), ".lzo"),
    "bzip2": (tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)), ("bzip2", "--decompress", "--stdout"), ".bz2"),
    "ZIP": ((b"PK\x03\x04",), ("unzip", "-p"), ".zip"),
    "7z": ((b"7z\xbc\xaf\x27\x1c",), ("7z", "x", "-so"), ".7z"),
    "RAR": ((b"Rar!\x1a\x07",), ("unrar", "p", "-inul"), ".rar"),
}
"""What packed files begin with, and what unpacks them (RFC 1952, RFC 8878, xz-file-format, lz4_Frame_format, bzip2,
APPNOTE.TXT, 7zFormat.txt; the others: file(1))."""

_TAR_AT, _TAR = 257, b"ustar"
"""Where an archive of tar, as an OVA is one, says so (tar(5))."""

LONGEST = 512
"""Bytes of a file's beginning that have all of these."""


LARGEST = 32 << 40
"""Bytes: the most that an image has (chunkd/src/manifest.rs, LARGEST); see virtman/sizes.py."""


def check_size(name: str, size: int) -> None:
    """Whether content of ``size`` bytes can be an image. Raises BadImageFile."""
    if size == 0:
        raise BadImageFile(f"{name} is empty")
    if size > LARGEST:
        raise BadImageFile(f"{name} has {size / (1 << 40):.4g}T, and an image has at most {LARGEST >> 40}T")


@contextmanager
def source(
    file: Path | Passed, folder: Path, room: Room, progress: Progress | None = None, base: Base | None = None
) -> Iterator[Content]:
    """What a file to publish holds, as ``inspect`` finds it. Raises BadImageFile, NoRoom, HostTrouble, and as ``base``.

    ``folder``: where the agent keeps what no caller may change meanwhile. ``base``: has what is below the file if that
    is an overlay; else an overlay is refused.
    """
    if base is not None and _is_overlay(file):
        with _over(base, file, folder, room, progress) as content:
            yield content
        return
    if not isinstance(file, Passed):
        yield inspect(file)
        return
    check_readable(file.fd, file.name)
    if file.trusted or not _begin(file.path, file.name).startswith(QCOW2_MAGIC):
        yield inspect(file.path, file.name, RAW if not file.trusted else None)
        return
    with mine(file, folder, room, progress) as path:
        yield inspect(path, file.name)


def _is_overlay(file: Path | Passed) -> bool:
    """Whether a file is a qcow2 whose header names another file. Raises BadImageFile."""
    if isinstance(file, Passed):
        check_readable(file.fd, file.name)
        begin = _begin(file.path, file.name)
    else:
        begin = _begin(file, file)
    return begin.startswith(QCOW2_MAGIC) and any(begin[_BASE_AT : _BASE_AT + _BASE_BYTES])


@contextmanager
def _over(
    base: Base, file: Path | Passed, folder: Path, room: Room, progress: Progress | None
) -> Iterator[Content]:  # fmt: skip
    """What an overlay holds over a base.

    No program opens the file that the header names: a copy of the overlay is read, and its header names none. qemu-img
    takes another base only together with the file name in the header (QEMU: block.c, bdrv_open_backing_file).
    """
    if not isinstance(file, Passed):
        with opened(file) as fd, _over(base, Passed(fd, file, trusted=True), folder, room, progress) as content:
            yield content
        return
    with mine(file, folder, room, progress) as path:
        with path.open("r+b") as copy:
            copy.seek(_BASE_AT)
            copy.write(bytes(_BASE_BYTES))
        yield inspect(path, file.name, QCOW2, base)


def inspect(
    path: Path, name: Path | None = None, image_format: str | None = None, base: Base | None = None
) -> Content:  # fmt: skip
    """Look at a file to publish, which people call ``name``; ``image_format``: of one that is known.

    ``base``: has what is below a qcow2 file whose header names nothing. Raises BadImageFile, and as ``base``.

    Only the magic number decides between raw and qcow2. Other formats are refused, with the command that converts them;
    so is a qcow2 that refers to other files, since it would publish whatever the agent may read.
    """
    name = name or path
    if not name.is_absolute():
        raise BadImageFile(f"{str(name)!r} is not an absolute path")
    begin = _begin(path, name)
    refuse_other_formats(name, begin)
    image_format = image_format or (QCOW2 if begin.startswith(QCOW2_MAGIC) else RAW)
    info = _info(path, name, image_format)
    _refuse_references(name, info)
    size = int(info["virtual-size"])
    check_size(str(name), size)
    if image_format == QCOW2:
        _check_qcow2(path, name, dirty=bool(info.get("dirty-flag")))
    location: tuple[str, ...] = ("-f", image_format, str(path))
    if base is not None:
        node = {"driver": QCOW2, "file": {"driver": "file", "filename": str(path)}, "backing": base()}
        location = ("json:" + json.dumps(node),)
    # A file that has space for its whole disk may be preallocated, and hold zeros, which no copy has.
    needed = held if (held := _held(location)) < size else 0
    return Content(str(name), location, size, needed)


def _begin(path: Path, name: Path) -> bytes:
    try:
        if not path.is_file():
            raise BadImageFile(f"{name} is not a file")
        with path.open("rb") as file:
            return file.read(LONGEST)
    except OSError as error:
        raise BadImageFile(f"cannot read {name}: {error.strerror}") from error


def _info(path: Path, name: Path, image_format: str) -> dict[str, Any]:
    try:
        answer = run(["qemu-img", "info", "--output=json", "-f", image_format, str(path)])
    except CommandFailed as error:
        why = last_line(error.stderr).replace(str(path), str(name))
        raise BadImageFile(f"{name} is not a whole {image_format} image: {why}") from error
    info: dict[str, Any] = json.loads(answer.stdout)
    return info


def _refuse_references(path: Path, info: dict[str, Any]) -> None:
    specific = info.get("format-specific", {}).get("data", {})
    for where, what, way_out in (
        (info, "backing-filename", ", or say with --parent which image holds what is below it"),
        (specific, "data-file", ""),
    ):
        if where.get(what):
            raise BadImageFile(
                f"{path} refers to another file ({what}); flatten it with qemu-img convert first{way_out}"
            )
    if info.get("encrypted"):
        raise BadImageFile(f"{path} is encrypted; decrypt it with qemu-img convert first")


def _check_qcow2(path: Path, name: Path, *, dirty: bool) -> None:
    """A qcow2 cut off at its end reads as zeros there, without an error: find that before anything is copied.

    ``dirty``: the file has lazy refcounts and was not closed. Then the refcounts are wrong, and the data may be right.
    """
    try:
        run(["qemu-img", "check", "-f", "qcow2", str(path)], timeout=CHECK_TIMEOUT)
    except CommandFailed as error:
        if error.code == LEAKS_ONLY:
            return
        if dirty:
            command = shlex.join(["qemu-img", "check", "-r", "all", str(name)])
            raise BadImageFile(
                f"{name} is a qcow2 image with lazy refcounts, and was not closed; repair it first: {command}"
            ) from error
        why = last_line(error.stderr or error.stdout).replace(str(path), str(name))
        raise BadImageFile(f"{name} is a damaged qcow2 image: {why}") from error


def _held(location: tuple[str, ...]) -> int:
    """The bytes that a file holds of its disk, which are more than the file has if they are compressed.

    For an overlay: with those of its base.
    """
    argv = ["qemu-img", "measure", "--output=json", "-O", QCOW2, *location]
    return int(json.loads(run(argv).stdout)["required"])


def refuse_other_formats(path: Path, begin: bytes, wanted: str = QCOW2) -> None:
    """Refuse packed files, and disks that have to be converted to ``wanted`` first, by how the file begins.

    Raises BadImageFile.
    """
    others = DISKS if wanted == QCOW2 else {**DISKS, QCOW2: ((0, QCOW2_MAGIC),)}
    for name, marks in others.items():
        if any(begin[offset:].startswith(mark) for offset, mark in marks):
            suffix = f".{wanted}"
            target = path.with_suffix(suffix) if path.suffix != suffix else path.with_name(f"{path.name}{suffix}")
            argv = ["qemu-img", "convert", "-O", wanted, str(path), str(target)]
            raise BadImageFile(f"{path} is a {name} disk; convert it first: {shlex.join(argv)}")
    for name, (marks_at_0, argv_of, suffix) in PACKED.items():
        if begin.startswith(marks_at_0):
            target = path.with_suffix("") if path.suffix == suffix else path.with_name(f"{path.name}.unpacked")
            command = f"{shlex.join([*argv_of, str(path)])} > {shlex.quote(str(target))}"
            raise BadImageFile(f"{path} is packed with {name}; unpack it first: {command}")
    if begin[_TAR_AT:].startswith(_TAR):
        command = shlex.join(["tar", "--extract", "--verbose", f"--directory={path.parent}", f"--file={path}"])
        raise BadImageFile(f"{path} is a tar archive, as an OVA is; unpack it first: {command}")
