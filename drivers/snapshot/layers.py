"""The files of one VM's disk: its layers, which of them is written to, and which of them snapshots keep.

The layers of all disks are files ``snapshots/.layers/<number>.qcow2``. No two layers of a host have the same number.
The header of a layer names the layer below by its absolute path, since QEMU and libvirt look for a relative name beside
the path that they were given, which may be a link in any folder. The header of the lowest layer names the image.

The folder ``snapshots/<vm>`` belongs to one disk. Its symlinks ``<number>.qcow2`` say which layers the disk has. Its
symlink ``disk.qcow2`` leads to the active layer, so that no program that opens the disk by its path writes to a layer
that a snapshot keeps. Its file ``snapshots.json`` names the snapshots.

A clone has symlinks to the layers of its source. A layer that several disks have is not written to, and all layers
below it are shared as well. A layer's file goes before the last symlink to it, so a crash leaves no file without one,
but for a new layer that holds nothing yet. A symlink that leads to nothing is of no layer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from drivers.base import BlockNode
from drivers.errors import BadDisk, VmDiskMissing
from drivers.host.durable import sync, write_atomically
from drivers.qemu.qcow2file import read_header

BACKING_PREFIX = "json:"
READING = ".reading-"
"""The name of a folder of links begins so if the links only keep layers while somebody reads them."""

_SUFFIX, _FRESH = ".qcow2", ".new"
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
        self._store = store_of(disks)
        self.path = self.folder / f"disk{_SUFFIX}"
        self._snapshots = self.folder / "snapshots.json"

    # What there is

    def exist(self) -> bool:
        """Whether the disk was made to its end."""
        return os.path.lexists(self.path)

    def _demand(self) -> None:
        if not self.exist():
            raise VmDiskMissing(self.vm)

    def chain(self) -> list[Layer]:
        """From the active layer down to the one over the image. Raises VmDiskMissing, BadDisk."""
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
        """One layer that this disk has, whatever headers name. Raises BadDisk."""
        if not self._name(number).is_symlink():
            raise BadDisk(f"VM {self.vm}: its disk has no layer {number} in {self.folder}")
        return self._read(number, self.file(number))

    def all(self) -> dict[int, Layer]:
        """All layers that were made to their end, also those that nobody needs. Raises VmDiskMissing, BadDisk."""
        self._demand()
        return {number: self.layer(number) for number in self._numbers() if self.file(number).exists()}

    def snapshots(self) -> dict[str, int]:
        """The layer of each snapshot. Raises VmDiskMissing, BadDisk."""
        self._demand()
        try:
            snapshots = json.loads(self._snapshots.read_bytes())["snapshots"]
            return {str(name): int(number) for name, number in snapshots.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadDisk(f"{self._snapshots} does not name snapshots: {error!r}") from error

    def todo(self, *, fold: bool = False, readers: bool = True) -> Step | None:
        """How to get rid of the next layer that nobody needs: see ``next_step``. Raises VmDiskMissing, BadDisk.

        ``readers``: whether a layer that only a reader has besides counts as shared.
        """
        below = {layer.number: layer.below for layer in self.all().values()}
        needed = {self._active().number, *self.snapshots().values()}
        for number in set(self._numbers()) - below.keys() - needed:
            return Step(number, None)  # a crash left its symlink alone
        with self._names():
            shared = self._of_others(readers=readers)
        return next_step(below, needed, shared, fold=fold)

    def file(self, number: int) -> Path:
        """Where a layer is."""
        return self._store / f"{number}{_SUFFIX}"

    def _name(self, number: int) -> Path:
        """The symlink that says that this disk has the layer."""
        return self.folder / f"{number}{_SUFFIX}"

    def _of_others(self, *, readers: bool = True) -> set[int]:
        """The layers that other disks have."""
        found = set[int]()
        for other in self.folder.parent.iterdir():
            if other not in (self.folder, self._store) and (readers or not other.name.startswith(READING)):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it goes at this moment; a file
                    found |= {int(path.stem) for path in other.iterdir() if _LAYER.fullmatch(path.name)}
        return found

    # Changes

    def locked(self) -> AbstractContextManager[None]:
        """Nobody else copies layers, or links them, meanwhile: a layer that is copied into cannot be opened."""
        return _flocked(self.folder)

    def _names(self) -> AbstractContextManager[None]:
        """Nobody else changes which disk has which layer, or what a disk or a layer is called, meanwhile."""
        return _flocked(self._store)

    def clear(self) -> None:
        """Remove what is there of a disk that was not made, or not deleted, to the end."""
        if self.folder.exists():
            for number in list(self._numbers()):
                self.remove(number)
            shutil.rmtree(self.folder)

    def delete(self) -> None:
        """Remove all. A crash leaves the whole disk, or something that nobody takes for one."""
        if self.exist():
            self.path.unlink()
            sync(self.folder)
        self.clear()

    def fresh(self) -> Path:
        """Where to make the next layer. Its number is higher than those of all layers that there are."""
        with self._names():
            number = 1 + max((int(path.stem) for path in self._store.iterdir() if path.stem.isdecimal()), default=-1)
            fresh = self.file(number).with_suffix(_FRESH)
            fresh.touch()
        return fresh

    def add(self, fresh: Path) -> int:
        """Make a file from ``fresh`` a layer of this disk, and its number known. Nobody uses it yet."""
        number = int(fresh.stem)
        self._make_folder()
        sync(fresh)
        with self._names():
            self._name(number).unlink(missing_ok=True)  # one that a crash left leads to nothing
            self._name(number).symlink_to(self.file(number))
            fresh.rename(self.file(number))
        sync(self.folder)
        sync(self._store)
        return number

    def activate(self, number: int) -> None:
        """Have the disk's path lead to a layer from now on."""
        link = self.folder / f"active{_FRESH}"
        link.unlink(missing_ok=True)
        link.symlink_to(self._name(number).name)
        link.rename(self.path)
        sync(self.folder)

    def write_snapshots(self, snapshots: Mapping[str, int]) -> None:
        """Replace all snapshots."""
        write_atomically(self._snapshots, json.dumps({"snapshots": snapshots}).encode())

    def remove(self, number: int) -> None:
        """Give up a layer that this disk does not need. Its file goes if no other disk has it."""
        with self._names():
            if number not in self._of_others():
                self.file(number).unlink(missing_ok=True)
            self._name(number).unlink(missing_ok=True)
        sync(self.folder)

    def rename(self, new: Layers) -> None:
        """Be the disk of another VM, of which there is nothing."""
        with self._names():
            self.folder.rename(new.folder)
        sync(self.folder.parent)

    def share(self, layers: Iterable[Layer]) -> None:
        """Have the layers of another disk, too. Raises BadDisk if one is gone."""
        self._make_folder()
        with self._names():
            for layer in layers:
                if not layer.path.exists():
                    raise _gone(self.vm, layer.path)
                self._name(layer.number).symlink_to(layer.path)
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
        self._demand()
        target = self.path.readlink() if self.path.is_symlink() else None
        if target is None or not _LAYER.fullmatch(str(target)):
            raise BadDisk(f"{self.path} is not a disk that was made here: it leads to {target}")
        return self.layer(int(target.stem))

    def _numbers(self) -> Iterator[int]:
        return (int(path.stem) for path in self.folder.iterdir() if _LAYER.fullmatch(path.name) and path.is_symlink())

    def _read(self, number: int, path: Path) -> Layer:
        try:
            header = read_header(path)
        except FileNotFoundError:
            raise _gone(self.vm, path) from None
        if header.external_data:
            raise BadDisk(f"{path} is not a disk that was made here: its data are in another file")
        backing = header.backing or ""
        if backing.startswith(BACKING_PREFIX):
            return Layer(number, path, header.size, backing, None)
        lower = Path(backing)
        if not _LAYER.fullmatch(lower.name):
            raise _not_ours(path, header.backing)
        return Layer(number, path, header.size, backing, int(lower.stem))


def store_of(disks: Path) -> Path:
    """The folder of all layers, in the folder of all disks: no VM's name begins with a dot."""
    return disks / ".layers"


def clean(disks: Path) -> None:
    """Remove what agents left that were killed: links of those who only read, and layers that were half made."""
    for left in disks.glob(f"{READING}*"):
        Layers(disks, left.name).clear()
    for left in store_of(disks).glob(f"*{_FRESH}"):
        left.unlink()


@contextlib.contextmanager
def _flocked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _is_export(node: object) -> bool:
    """Whether a node is one of NBD at a unix socket, as raw.

    Those who may write to a disk's file may change its header, and the QEMU that opens what it names is the agent's.
    """
    server = node["file"].get("server") if _has(node, "raw", "file") and _has(node["file"], "nbd", "server") else None
    return isinstance(server, dict) and set(server) == {"type", "path"} and server["type"] == "unix"


def _has(node: Any, driver: str, part: str) -> TypeGuard[dict[str, Any]]:
    return isinstance(node, dict) and node.get("driver") == driver and isinstance(node.get(part), dict)


def _gone(vm: str, path: Path) -> BadDisk:
    return BadDisk(f"VM {vm}: a layer of its disk is gone: {path}")


def _not_ours(path: Path, backing: str | None) -> BadDisk:
    return BadDisk(f"{path} is not a disk that was made here: its backing is {backing!r}")
