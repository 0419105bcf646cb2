"""The layers of one VM's qcow2 disk: which of them is written to, and which of them snapshots keep.

The header of a layer names the layer below by its absolute path, since QEMU and libvirt look for a relative name beside
the path that they were given, which may be a link in any folder. The header of the lowest layer names the image.

The folder ``snapshots/<vm>`` belongs to one disk. Its symlinks ``<number>.qcow2`` say which layers the disk has. Its
symlink ``disk.qcow2`` leads to the active layer, so that no program that opens the disk by its path writes to a layer
that a snapshot keeps. Its file ``snapshots.json`` names the snapshots.

A clone has symlinks to the layers of its source. A layer that several disks have is not written to, and all layers
below it are shared as well. A layer's file goes before the last symlink to it, so a crash leaves no file without a
symlink, but for a new layer that holds nothing yet. A symlink that leads to nothing is of no layer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivers.base import BlockNode
from drivers.errors import BadDisk, DriverError, VmDiskMissing
from drivers.host.command import run
from drivers.host.durable import sync, write_atomically
from drivers.qemu.qcow2file import read_header
from drivers.snapshot.layerstore import FRESH, LAYER, READING, SUFFIX, LayerStore, flocked, give_as

BACKING_PREFIX = "json:"

_LAYOUT = "cluster_size=128k,extended_l2=on"
"""Subclusters of 4 KiB: a small first write copies 4 KiB from the image, not a cluster fetched from the parents."""

_LAYOUT_ABOVE = "cluster_size=16k"
"""Of all layers but the lowest. To copy into a layer with subclusters kills QEMU 7.2, and the VM with it: it aligns to
clusters what is allocated by subclusters (block/io.c, bdrv_co_do_copy_on_readv: "skip_bytes < pnum"). Small, since a
first write copies a cluster; not smaller, since QEMU holds 32 MiB of tables, which are those of 64 GiB then."""


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
        """The node below the lowest layer. Raises BadDisk if that is no export of this host.

        Those who may write to a disk's file may change its header, and it is the agent's QEMU that opens the node.
        """
        try:
            node: Any = json.loads(self.backing.removeprefix(BACKING_PREFIX))
        except ValueError:
            node = None
        match node:
            case {"driver": "raw", "file": {"driver": "nbd", "server": {"type": "unix", "path": _, **rest}}} if (
                not rest
            ):
                return dict(node)
        raise _not_ours(self.path, self.backing)


@dataclass(frozen=True)
class Step:
    """A layer that nobody needs, and the layer that takes over what it holds, if any does."""

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
    """The disk of one VM. Reading calls raise BadDisk, and VmDiskMissing if the disk was not made to its end."""

    def __init__(self, store: LayerStore, vm: str) -> None:
        self.vm, self._store = vm, store
        self.folder = store.disks / vm
        self.path = self.folder / f"disk{SUFFIX}"
        self._snapshots = self.folder / "snapshots.json"

    # What there is

    def exist(self) -> bool:
        """Whether the disk was made to its end."""
        return os.path.lexists(self.path)

    def chain(self) -> list[Layer]:
        """From the active layer down to the one over the image."""
        return self.down_from(self._active())

    def down_from(self, layer: Layer) -> list[Layer]:
        """A layer and all below it."""
        chain = [layer]
        while chain[-1].below is not None:
            if chain[-1].below >= chain[-1].number:
                raise _not_ours(chain[-1].path, chain[-1].backing)
            chain.append(self.layer(chain[-1].below))
        return chain

    def layer(self, number: int) -> Layer:
        """One layer, which this disk must have, whatever headers name."""
        path = self.file(number)
        if not self._link(number).is_symlink():
            raise BadDisk(f"VM {self.vm}: its disk has no layer {number} in {self.folder}")
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
        if not LAYER.fullmatch(lower.name):
            raise _not_ours(path, header.backing)
        return Layer(number, path, header.size, backing, int(lower.stem))

    def all(self) -> dict[int, Layer]:
        """All layers that were made to their end, also those that nobody needs."""
        self._require()
        return {number: self.layer(number) for number in self._numbers() if self.file(number).exists()}

    def snapshots(self) -> dict[str, int]:
        """The layer of each snapshot."""
        self._require()
        try:
            snapshots = json.loads(self._snapshots.read_bytes())["snapshots"]
            return {str(name): int(number) for name, number in snapshots.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadDisk(f"{self._snapshots} does not name snapshots: {error!r}") from error

    def next_unneeded(self, *, fold: bool, readers: bool = True) -> Step | None:
        """The next layer that nobody needs, and how to remove it: see ``next_step``.

        ``readers``: whether a layer that only a reader has besides counts as shared.
        """
        below = {layer.number: layer.below for layer in self.all().values()}
        needed = {self._active().number, *self.snapshots().values()}
        for number in set(self._numbers()) - below.keys() - needed:
            return Step(number, None)  # a crash left its symlink alone
        with self._store.locked():
            shared = self._store.used_beside(self.folder, readers=readers)
        return next_step(below, needed, shared, fold=fold)

    def file(self, number: int) -> Path:
        return self._store.file(number)

    # Changes

    def locked(self) -> AbstractContextManager[None]:
        """Nobody else copies layers, or links them, meanwhile: a layer that is copied into cannot be opened."""
        return flocked(self.folder)

    def delete(self) -> None:
        """Remove the disk, whole or half made. A crash leaves the whole disk, or nothing that is taken for one."""
        if self.exist():
            self.path.unlink()
            sync(self.folder)
        if self.folder.exists():
            for number in list(self._numbers()):
                self.remove(number)
            shutil.rmtree(self.folder)

    def make_lowest(self, image: BlockNode, size: int) -> int:
        """Make the layer over an image, for the group's members to use. Raises NoSpace, CommandFailed."""
        backing = BACKING_PREFIX + json.dumps({"driver": "raw", "file": image})
        return self._make(["-o", _LAYOUT, "-F", "raw", "-b", backing], size)

    def make_over(self, below: Layer, *, of_another: bool = False) -> int:
        """Make a layer that reads as ``below``, with its owner. Raises NoSpace, CommandFailed.

        ``of_another``: ``below`` is of another VM, whose owner need not be this one's. Then the group's members may
        use the layer.
        """
        layout = ["-o", _LAYOUT_ABOVE, "-F", "qcow2", "-b", str(below.path)]
        return self._make(layout, below.size, owner=below.path, shared=of_another)

    def add(self, fresh: Path) -> int:
        """Make a file from ``LayerStore.fresh`` a layer of this disk, which nobody uses yet. Returns its number."""
        number = int(fresh.stem)
        self._make_folder()
        sync(fresh)
        with self._store.locked():
            self._link(number).unlink(missing_ok=True)  # one that a crash left leads to nothing
            self._link(number).symlink_to(self.file(number))
            fresh.rename(self.file(number))
        sync(self.folder)
        sync(self._store.folder)
        return number

    def activate(self, number: int) -> None:
        """Have the disk's path lead to a layer from now on."""
        link = self.folder / f"active{FRESH}"
        link.unlink(missing_ok=True)
        link.symlink_to(self._link(number).name)
        link.rename(self.path)
        sync(self.folder)

    def write_snapshots(self, snapshots: Mapping[str, int]) -> None:
        write_atomically(self._snapshots, json.dumps({"snapshots": snapshots}).encode())

    def remove(self, number: int) -> None:
        """Remove a layer from this disk, and its file unless another disk has it."""
        with self._store.locked():
            if number not in self._store.used_beside(self.folder):
                self.file(number).unlink(missing_ok=True)
            self._link(number).unlink(missing_ok=True)
        sync(self.folder)

    def rename(self, new: Layers) -> None:
        """Be the disk of another VM, which has nothing."""
        with self._store.locked():
            self.folder.rename(new.folder)
        sync(self.folder.parent)

    def share(self, layers: Iterable[Layer]) -> None:
        """Have the layers of another disk, too. Raises BadDisk if one is gone."""
        self._make_folder()
        with self._store.locked():
            for layer in layers:
                if not layer.path.exists():
                    raise _gone(self.vm, layer.path)
                self._link(layer.number).symlink_to(layer.path)
        sync(self.folder)

    def _require(self) -> None:
        if not self.exist():
            raise VmDiskMissing(self.vm)

    def _link(self, number: int) -> Path:
        """The symlink that says that this disk has the layer."""
        return self.folder / f"{number}{SUFFIX}"

    def _active(self) -> Layer:
        self._require()
        target = self.path.readlink() if self.path.is_symlink() else None
        if target is None or not LAYER.fullmatch(str(target)):
            raise BadDisk(f"{self.path} is not a disk that was made here: it leads to {target}")
        return self.layer(int(target.stem))

    def _numbers(self) -> Iterator[int]:
        return (int(path.stem) for path in self.folder.iterdir() if LAYER.fullmatch(path.name) and path.is_symlink())

    def _make(self, layout: Sequence[str], size: int, owner: Path | None = None, *, shared: bool = False) -> int:
        fresh = self._store.fresh()
        try:
            run(["qemu-img", "create", "-q", "-u", "-f", "qcow2", *layout, str(fresh), str(size)])
            if owner is not None:
                give_as(owner, fresh)
            if owner is None or shared:
                self._store.let_write(fresh)
            return self.add(fresh)
        except (DriverError, OSError):
            fresh.unlink(missing_ok=True)
            self._store.require_room()
            raise

    def _make_folder(self) -> None:
        """Whoever may pass through the folder of all disks to the VM's may pass through the VM's."""
        if not self.folder.exists():
            self.folder.mkdir()
            stat = self.folder.parent.stat()
            if stat.st_gid != self.folder.stat().st_gid:
                os.chown(self.folder, -1, stat.st_gid)
            self.folder.chmod(stat.st_mode & 0o777)
            sync(self.folder.parent)


def remove_orphans(store: LayerStore) -> None:
    """Remove what killed agents left: links of those who only read, and layers that were half made."""
    for left in store.disks.glob(f"{READING}*"):
        Layers(store, left.name).delete()
    for left in store.folder.glob(f"*{FRESH}"):
        left.unlink()


def _gone(vm: str, path: Path) -> BadDisk:
    return BadDisk(f"VM {vm}: a layer of its disk is gone: {path}")


def _not_ours(path: Path, backing: str | None) -> BadDisk:
    return BadDisk(f"{path} is not a disk that was made here: its backing is {backing!r}")
