"""The files of one VM's disk: its layers, which of them is written to, and which of them points keep.

``<vm>/<number>.qcow2`` are the layers, whose headers say who is over whom; the lowest is over the image. The symlink
``<vm>/disk.qcow2`` leads to the active layer, so that who uses the disk by its path never writes to a layer that a
point keeps. ``<vm>/points.json`` names the points. A disk of an earlier release is a file ``<vm>.qcow2``.

A header names the layer below by its number alone. So a clone has the layers of its source under the same numbers, by
hard links, and what several disks have is known by the number of links (link(2), stat(2)). Such a layer is not written
to, and lies over others that are shared too, as it was linked with all of them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from drivers.base import BlockNode
from drivers.errors import BadDisk, NotPossible, SnapshotMissing
from drivers.host.durable import sync, write_atomically
from drivers.qemu.qcow2file import read_header

BACKING_PREFIX = "json:"
_SUFFIX, _FRESH = ".qcow2", ".new"
_CANNOT_LINK = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP})
"""What link(2) says where it can never do it, or for one file not once more."""

_LAYER = re.compile(r"(\d{1,9})\.qcow2", re.ASCII)


@dataclass(frozen=True)
class Layer:
    """``size`` of the disk in bytes; ``backing`` as in the header; ``below``: the layer's number, None of the image."""

    number: int
    path: Path
    size: int
    backing: str
    below: int | None

    @property
    def image(self) -> BlockNode:
        """What the lowest layer is over: an export of this host, whatever somebody wrote there. Raises BadDisk."""
        try:
            node = json.loads(self.backing.removeprefix(BACKING_PREFIX))
        except ValueError:
            node = None
        if not _is_export(node):
            raise _not_ours(self.path, self.backing)
        found: BlockNode = node
        return found


@dataclass(frozen=True)
class Step:
    """A layer that nobody needs, and the one that takes over what it holds, if any does."""

    lower: int
    upper: int | None


def next_step(
    below: Mapping[int, int | None], kept: Iterable[int], shared: Iterable[int] = (), *, fold: bool = False
) -> Step | None:
    """What to do next so that no layer is left but those to be kept, and those with several others over them.

    From above, so that what several layers hold is copied once. Into a layer that is ``shared`` with other disks
    nothing is copied: that would change a file which they have open. Out of one only to ``fold`` the disk, since that
    frees nothing: it gets a copy of what it had in common with others.
    """
    shared = set(shared)
    above: dict[int, list[int]] = {number: [] for number in below}
    for number, lower in below.items():
        if lower in above:
            above[lower].append(number)
    for number in sorted(set(below) - set(kept), reverse=True):
        if not above[number]:
            return Step(number, None)
        if len(above[number]) == 1 and not shared & {*above[number], *([] if fold else [number])}:
            return Step(number, above[number][0])
    return None


class Layers:
    """What there is of the disk of one VM in the folder of all disks."""

    def __init__(self, disks: Path, vm: str) -> None:
        self.vm = vm
        self.folder = disks / vm
        self._link = self.folder / f"disk{_SUFFIX}"
        self._points = self.folder / "points.json"
        self._earlier = disks / f"{vm}{_SUFFIX}"
        self._half_made = disks / f"{vm}{_FRESH}"  # by an earlier release

    # What there is

    def exist(self) -> bool:
        """Whether the disk was made to its end."""
        return os.path.lexists(self._link) or self._earlier.exists()

    @property
    def path(self) -> Path:
        """Where the disk is opened. Raises SnapshotMissing."""
        return self._earlier if self.of_an_earlier_release() else self._link

    def of_an_earlier_release(self) -> bool:
        """Whether the disk is one file, or was not adopted to the end. Raises SnapshotMissing."""
        if not self.exist():
            raise SnapshotMissing(self.vm)
        return self._earlier.exists()

    def chain(self) -> list[Layer]:
        """From the active layer down to the one over the image. Raises SnapshotMissing, BadDisk."""
        return self.down_from(self._active())

    def down_from(self, layer: Layer) -> list[Layer]:
        """A layer and all below it. Raises BadDisk."""
        chain = [layer]
        while chain[-1].below is not None:
            if chain[-1].below >= chain[-1].number:
                raise _not_ours(chain[-1].path, chain[-1].backing)
            chain.append(self.layer(chain[-1].below))
        return chain

    def layer(self, number: int) -> Layer:
        """One layer. Raises BadDisk."""
        return self._read(number, self.file(number))

    def all(self) -> dict[int, Layer]:
        """All layers that were made to their end, also those that nobody needs. Raises SnapshotMissing, BadDisk."""
        if self.of_an_earlier_release():
            return {0: self._active()}
        return {number: self.layer(number) for number in self._numbers()}

    def points(self) -> dict[str, int]:
        """The layer of each point. Raises SnapshotMissing, BadDisk."""
        if self.of_an_earlier_release():
            return {}
        try:
            points = json.loads(self._points.read_bytes())["points"]
            return {str(name): int(number) for name, number in points.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadDisk(f"{self._points} does not name points: {error!r}") from error

    def todo(self, *, fold: bool = False, readers: Mapping[int, int] | None = None) -> Step | None:
        """How to get rid of the next layer that nobody needs: see ``next_step``. Raises SnapshotMissing, BadDisk.

        ``readers``: links that are left out, by inode, as they are only there for a while.
        """
        layers = self.all()
        below = {layer.number: layer.below for layer in layers.values()}
        stats = {number: layer.path.stat() for number, layer in layers.items()}
        shared = {number for number, stat in stats.items() if stat.st_nlink - (readers or {}).get(stat.st_ino, 0) > 1}
        return next_step(below, {self._active().number, *self.points().values()}, shared, fold=fold)

    def file(self, number: int) -> Path:
        """Where a layer is."""
        return self.folder / f"{number}{_SUFFIX}"

    # Changes

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else copies layers, or links them, meanwhile: a layer that is copied into cannot be opened."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def clear(self) -> None:
        """Remove what is there of a disk that was not made, or not deleted, to the end."""
        self._half_made.unlink(missing_ok=True)
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def delete(self) -> None:
        """Remove all. A crash leaves the whole disk, or something that nobody takes for one."""
        for path in (self._earlier, self._link):
            if os.path.lexists(path):
                path.unlink()
                sync(path.parent)
        self.clear()

    def fresh(self) -> Path:
        """Where to make the next layer; what was half made is gone."""
        self._make_folder()
        for path in self.folder.glob(f"*{_FRESH}"):
            path.unlink()
        return self.folder / f"{max(self._numbers(), default=-1) + 1}{_FRESH}"

    def add(self, fresh: Path) -> int:
        """Make a file from ``fresh`` a layer, and its number known. Nobody uses it yet."""
        sync(fresh)
        fresh.rename(fresh.with_suffix(_SUFFIX))
        sync(self.folder)
        return int(fresh.stem)

    def activate(self, number: int) -> None:
        """Have the disk's path lead to a layer from now on."""
        link = self.folder / f"active{_FRESH}"
        link.unlink(missing_ok=True)
        link.symlink_to(self.file(number).name)
        link.rename(self._link)
        sync(self.folder)

    def write_points(self, points: Mapping[str, int]) -> None:
        """Replace all points."""
        write_atomically(self._points, json.dumps({"points": points}).encode())

    def remove(self, number: int) -> None:
        """Delete a layer that nobody needs."""
        self.file(number).unlink(missing_ok=True)
        sync(self.folder)

    def adopt(self) -> None:
        """Make the file of an earlier release the lowest layer, and whole at every moment. Its path goes: by that one
        QEMU would look for the layers below in another folder.
        """
        self.clear()
        self._make_folder()
        if self._earlier.is_symlink():
            self.file(0).symlink_to(self._earlier.resolve(strict=True))
        else:
            _link(self._earlier, self.file(0))
        self.activate(0)
        self._earlier.unlink()
        sync(self._earlier.parent)

    def rename(self, new: Layers) -> None:
        """Be the disk of another VM, of which there is nothing. Headers name layers by their numbers, and stay."""
        self.folder.rename(new.folder)
        sync(self.folder.parent)

    def share(self, layers: Iterable[Layer]) -> None:
        """Have the layers of another disk, under the same numbers. Raises NotPossible; OSError if a file is gone."""
        self._make_folder()
        for layer in layers:
            _link(layer.path, self.file(layer.number))
        sync(self.folder)

    def _make_folder(self) -> None:
        """Who may pass through the folder of all disks to a VM's may do so through this one."""
        if not self.folder.exists():
            self.folder.mkdir()
            stat = self.folder.parent.stat()
            if stat.st_gid != self.folder.stat().st_gid:
                os.chown(self.folder, -1, stat.st_gid)
            self.folder.chmod(stat.st_mode & 0o777)
            sync(self.folder.parent)

    def _active(self) -> Layer:
        if self.of_an_earlier_release():
            return self._read(0, self._earlier)
        target = self._link.readlink() if self._link.is_symlink() else None
        if target is None or not _LAYER.fullmatch(str(target)):
            raise BadDisk(f"{self._link} is not a disk that was made here: it leads to {target}")
        return self.layer(int(target.stem))

    def _numbers(self) -> Iterator[int]:
        return (int(path.stem) for path in self.folder.iterdir() if _LAYER.fullmatch(path.name))

    def _read(self, number: int, path: Path) -> Layer:
        try:
            header = read_header(path)
        except FileNotFoundError:
            raise BadDisk(f"VM {self.vm}: a layer of its disk is gone: {path}") from None
        if header.external_data:
            raise BadDisk(f"{path} is not a disk that was made here: its data are in another file")
        backing = header.backing or ""
        if backing.startswith(BACKING_PREFIX):
            return Layer(number, path, header.size, backing, None)
        if not _LAYER.fullmatch(backing):
            raise _not_ours(path, header.backing)
        return Layer(number, path, header.size, backing, int(Path(backing).stem))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in _CANNOT_LINK:
            raise NotPossible(
                f"{source} gets no second name, so its disk can be neither cloned nor copied: {error.strerror};"
                f" {target.parent.parent} must be on one file system that has hard links"
            ) from error
        raise


def _is_export(node: object) -> bool:
    """Whether a node is one of NBD at a unix socket, as raw.

    Those who may write to a disk's file may change its header, and the QEMU that opens what it names is the agent's.
    """
    server = node["file"].get("server") if _has(node, "raw", "file") and _has(node["file"], "nbd", "server") else None
    return isinstance(server, dict) and set(server) == {"type", "path"} and server["type"] == "unix"


def _has(node: Any, driver: str, part: str) -> TypeGuard[dict[str, Any]]:
    return isinstance(node, dict) and node.get("driver") == driver and isinstance(node.get(part), dict)


def _not_ours(path: Path, backing: str | None) -> BadDisk:
    return BadDisk(f"{path} is not a disk that was made here: its backing is {backing!r}")
