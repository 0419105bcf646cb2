"""A VM's private disk: qcow2 layers on top of the image that this host serves.

Each file's header names its backing, so that any QEMU opens the disk by its path alone and holds its requests while the
storage daemon restarts.

A snapshot is a layer that is written to no more: a new one over it becomes the active one, unless that below the active
one holds the same, because nobody wrote since. First the disk's path leads there, then a running QEMU is switched, then
the snapshot gets its name; so whoever opens the disk after a crash writes to the new layer, and a QEMU that was not
switched is when the next call finds it so. A layer that neither is active nor a snapshot's is copied into the one over
it, or just deleted if nothing or something else is there (``next_step``).

QEMU's locks on the files tell whether another program has the disk open (QEMU: block/file-posix.c).

A hypervisor may keep snapshots inside the active layer ("virsh snapshot-create": a system snapshot). They cannot go
along into another layer or another disk, so no call changes the layers while there are any.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from drivers.base import BlockNode, Device, Monitor, Place, Range
from drivers.door import door
from drivers.errors import (
    BadDevice,
    BadDisk,
    CommandFailed,
    DiskInUse,
    DriverError,
    MonitorFailed,
    NoSpace,
    NotPossible,
    SnapshotMissing,
)
from drivers.host.command import run
from drivers.host.durable import sync
from drivers.host.space import Room, shortage
from drivers.names import checked, is_name
from drivers.needs import QEMU_IMG, QEMU_STORAGE_DAEMON, Needs
from drivers.qemu.allocation import allocated
from drivers.qemu.monitor import SETPRIV, is_locked, open_node, private_daemon
from drivers.qemu.nodes import Nodes, named_after
from drivers.qemu.qcow2file import is_empty, read_header
from drivers.qemu.streaming import settle, stream
from drivers.snapshot.layers import BACKING_PREFIX, READING, Layer, Layers, clean, store_of

log = logging.getLogger(__name__)

_SECTOR = 512
_ROOM = 1 << 20
"""Bytes that must be free for an empty disk: it takes 0.3 MB."""

_LAYOUT = "cluster_size=128k,extended_l2=on"
"""Subclusters of 4 KiB: a small first write copies 4 KiB from the image, not a cluster fetched from the parents."""

_LAYOUT_ABOVE = "cluster_size=16k"
"""Of all layers but the lowest. To copy into a layer with subclusters kills QEMU 7.2, and the VM with it: it aligns to
clusters what is allocated by subclusters (block/io.c, bdrv_co_do_copy_on_readv: "skip_bytes < pnum"). Small, since a
first write copies a cluster; not smaller, since QEMU holds 32 MiB of tables, which are those of 64 GiB then."""

DEEP = 32
"""Layers. A disk has one more after each call that cloned it, and a change of a running VM's takes the longer the more
there are, with its guest held still. One with more than these gets a copy of its own of what it shares with clones."""

DEEPEST = 200
"""Layers. With so many QEMU holds a guest still for seconds at each change; only snapshots make a disk as deep."""

_PRIVATE = "virtman-private"


@door
class Qcow2Disks:
    """Disks of VMs in ``<state>/snapshots``."""

    moves_live = True

    needs = Needs(tools=(QEMU_IMG, QEMU_STORAGE_DAEMON, SETPRIV))

    def __init__(self, place: Place) -> None:
        self._group, self._room = place.group, Room(place.state, place.reserve)
        self._folder = place.state / "snapshots"
        self._store = store_of(self._folder)
        for folder in (self._folder, self._store):
            folder.mkdir(parents=True, exist_ok=True)
        clean(self._folder)  # there is one agent at a time

    def create(self, vm: str, origin: Device, size: int) -> Device:
        """A disk of ``size`` bytes over ``origin``, which this host's export made (``NbdExport.local``).

        Raises BadDisk if the size is below the image's or no multiple of 512; BadDevice, BadName, NoSpace,
        CommandFailed.
        """
        layers = self._layers(vm)
        if layers.exist():
            return self.open(vm)
        if origin.node is None:
            raise BadDevice(f"VM {vm}: the origin has no QEMU block node")
        if size < origin.size or size % _SECTOR:
            raise BadDisk(f"VM {vm}: {size} is not a disk size: a multiple of {_SECTOR}, and at least {origin.size}")
        layers.clear()
        backing = BACKING_PREFIX + json.dumps({"driver": "raw", "file": origin.node})
        try:
            layers.activate(self._make(layers, ["-o", _LAYOUT, "-F", "raw", "-b", backing], size))
        except (DriverError, OSError):
            layers.delete()
            raise
        return self.open(vm)

    def open(self, vm: str) -> Device:
        """The VM's disk as its files describe it. Raises VmDiskMissing, BadDisk, BadName."""
        layers = self._layers(vm)
        chain = layers.chain()
        return Device(size=chain[0].size, path=layers.path, node=_node(chain))

    def delete(self, vm: str) -> None:
        """Remove the VM's disk, whole or half made."""
        self._layers(vm).delete()

    def rename(self, vm: str, new: str) -> Device:
        """Let the disk be that of another name. Raises VmDiskMissing, BadDisk, BadName, DiskInUse."""
        old, renamed = self._layers(vm), self._layers(new)
        if old.exist() or not renamed.exist():
            if renamed.exist():
                raise BadDisk(f"VM {new} has a disk, and the one of VM {vm} cannot get its name")
            with self._held(old, None):
                pass  # nobody else has the disk open
            renamed.clear()
            old.rename(renamed)
        return self.open(new)

    def resize(self, vm: str, size: int, monitor: Monitor | None) -> Device:
        """Let the disk have ``size`` bytes; what is new are zeros.

        Raises VmDiskMissing, BadDisk, DiskInUse, MonitorFailed.
        """
        layers = self._layers(vm)
        active = layers.chain()[0]
        if size < active.size or size % _SECTOR:
            raise BadDisk(f"VM {vm}: {size} is not a disk size: a multiple of {_SECTOR}, and at least {active.size}")
        if size != active.size:
            with self._held(layers, monitor) as nodes:
                nodes.monitor.execute("block_resize", {"node-name": nodes.demand(active.path), "size": size})
        return self.open(vm)

    def take(self, vm: str, snapshot: str, monitor: Monitor | None) -> Device:
        """Keep what the disk holds now as a snapshot; one of this name that is there is left alone.

        Raises VmDiskMissing, DiskInUse, NotPossible, NoSpace, MonitorFailed.
        """
        layers = self._layers(vm)
        checked(snapshot)
        if monitor is not None or snapshot not in layers.snapshots():
            with self._held(layers, monitor) as nodes:
                if snapshot not in layers.snapshots():
                    _refuse_internal_snapshots(layers)
                    self._keep(layers, snapshot, nodes if monitor is not None else None)
        if monitor is None:  # a guest may be held still until this returns; the next ``drop`` tidies then
            self._tidy_if_possible(layers)
        return self.open(vm)

    def revert(self, vm: str, snapshot: str) -> Device:
        """Let the disk hold, and be as large as, what the snapshot keeps: what was written since is gone, snapshots
        stay.

        Raises VmDiskMissing, SnapshotMissing, DiskInUse, NoSpace, NotPossible.
        """
        layers = self._layers(vm)
        kept = self._at(layers, checked(snapshot))[0]
        with self._held(layers, None):
            _refuse_internal_snapshots(layers)
            layers.activate(self._make_over(layers, kept))
        self._tidy_if_possible(layers)
        return self.open(vm)

    def drop(self, vm: str, snapshot: str, monitor: Monitor | None) -> None:
        """Forget a snapshot, and free what no other snapshot and not the disk needs. One that is not there is fine.

        Once the snapshot is forgotten an error says that not all is freed; the next call goes on with it. Raises
        VmDiskMissing, DiskInUse, NoSpace, NotPossible, MonitorFailed.
        """
        layers = self._layers(vm)
        snapshots = layers.snapshots()
        if snapshots.pop(checked(snapshot), None) is None and not self._is_untidy(layers):
            return
        with self._held(layers, monitor) as nodes:
            _refuse_internal_snapshots(layers)
            if snapshots != layers.snapshots():
                layers.write_snapshots(snapshots)
        self._tidy(layers, nodes if monitor is not None else None)
        if self._is_untidy(layers):  # which others read meanwhile
            raise DiskInUse(vm)

    def snapshots(self, vm: str) -> frozenset[str]:
        """The names of the snapshots of a disk. Raises VmDiskMissing."""
        return frozenset(self._layers(vm).snapshots())

    def clone(self, vm: str, snapshot: str, new: str) -> Device:
        """A disk of another VM that holds what the snapshot keeps, without copying it; an existing one is returned.

        Raises VmDiskMissing, SnapshotMissing, BadDisk, BadName, NoSpace.
        """
        source, clone = self._layers(vm), self._layers(new)
        number = source.snapshots().get(checked(snapshot))
        if number is None:
            raise SnapshotMissing(vm, snapshot)
        if clone.exist():
            return self.open(new)
        try:
            with source.locked():
                clone.clear()
                shared = self._at(source, snapshot)
                self._let_read(shared)
                clone.share(shared)
            clone.activate(self._make_over(clone, clone.layer(number), of_another=True))
        except (DriverError, OSError):
            clone.delete()
            raise
        return self.open(new)

    @contextlib.contextmanager
    def reading(self, vm: str, snapshot: str) -> Iterator[Device]:
        """The layers of a snapshot, for QEMU's programs, by links.

        Raises VmDiskMissing, SnapshotMissing, BadDisk, BadName.
        """
        with self._linked(self._layers(vm), checked(snapshot)) as (chain, _snapshots):
            yield Device(chain[0].size, chain[0].path, _node(chain))

    def changes(self, vm: str, snapshot: str | None, since: str | None) -> list[Range]:
        """What the layers above that of ``since`` hold, or all layers. Raises VmDiskMissing, SnapshotMissing,
        NotPossible if that snapshot is not below, DiskInUse, BadDisk, BadName, CommandFailed.

        The layers of a snapshot are looked at by links, so that other snapshots may come and go meanwhile.
        """
        layers = self._layers(vm)
        for name in (name for name in (snapshot, since) if name is not None):
            checked(name)
        if snapshot is None:
            return _held_above(vm, layers.chain(), layers.snapshots(), since)
        with self._linked(layers, snapshot) as (chain, snapshots):
            return _held_above(vm, chain, snapshots, since)

    def existing(self) -> frozenset[str]:
        """VMs with a disk, whole or half made."""
        return frozenset(path.name for path in self._folder.iterdir() if is_name(path.name))  # not "lost+found", say

    def spare(self) -> int:
        """What the file system has to spare."""
        return self._room.spare(self._store)

    def trouble(self) -> str:
        """Whether the file system is running full under the disks."""
        reserve = self._room.reserve(self._store)
        said = shortage(self._store, reserve + reserve // 16) if self.existing() else ""
        return f"{said}; caches take in little more, or nothing" if said else ""

    # Layers

    def _layers(self, vm: str) -> Layers:
        return Layers(self._folder, checked(vm))

    def _at(self, layers: Layers, snapshot: str) -> list[Layer]:
        """The layer of a snapshot with those below it."""
        return layers.down_from(layers.layer(_number(layers.vm, layers.snapshots(), snapshot)))

    @contextlib.contextmanager
    def _linked(self, layers: Layers, snapshot: str) -> Iterator[tuple[list[Layer], dict[str, int]]]:
        """The layers of a snapshot by links, so that they stay, and nothing is copied into them; and what the layer of
        each snapshot was when they were linked. Raises VmDiskMissing, SnapshotMissing, BadDisk.
        """
        links = Layers(self._folder, f"{READING}{secrets.token_hex(8)}")
        _number(layers.vm, layers.snapshots(), snapshot)  # a disk that is not there has no folder to lock
        try:
            with layers.locked():
                snapshots = layers.snapshots()
                number = _number(layers.vm, snapshots, snapshot)
                links.share(layers.down_from(layers.layer(number)))
            yield links.down_from(links.layer(number)), snapshots
        finally:
            links.clear()

    def _keep(self, layers: Layers, snapshot: str, running: Nodes | None) -> None:
        """Let a snapshot keep what the disk holds now."""
        active, *lower = layers.chain()
        if running is None and lower and lower[0].size == active.size and is_empty(active.path):
            kept = lower[0]
        else:
            kept = active
            self._freeze(layers, running)
        layers.write_snapshots({**layers.snapshots(), snapshot: kept.number})

    def _freeze(self, layers: Layers, running: Nodes | None) -> None:
        """Go on writing to a new layer. Raises NotPossible."""
        chain = layers.chain()
        if len(chain) >= DEEPEST:
            raise NotPossible(
                f"the disk of VM {layers.vm} has {len(chain)} layers, and gets no more: delete snapshots of it first"
            )
        layers.activate(self._make_over(layers, chain[0]))
        if running is not None:
            _lift(running, layers.chain())

    def _make_over(self, layers: Layers, below: Layer, *, of_another: bool = False) -> int:
        """A new layer that reads as ``below``, and that the VM's QEMU may open as it may that one.

        ``of_another``: that one is of another VM, whose group's members need not be those who write to this one.
        """
        layout = ["-o", _LAYOUT_ABOVE, "-F", "qcow2", "-b", str(below.path)]
        return self._make(layers, layout, below.size, owner=below.path, shared=of_another)

    def _make(
        self, layers: Layers, layout: Sequence[str], size: int, owner: Path | None = None, *, shared: bool = False
    ) -> int:
        """A new layer, that is opened by whom ``owner`` is; without one, or if it is ``shared``, by the group."""
        self._require_room()
        fresh = layers.fresh()
        try:
            run(["qemu-img", "create", "-q", "-u", "-f", "qcow2", *layout, str(fresh), str(size)])
            if owner is not None:
                _give_as(owner, fresh)
            if owner is None or shared:
                self._let_write(fresh)
            return layers.add(fresh)
        except (DriverError, OSError):
            fresh.unlink(missing_ok=True)
            self._require_room()
            raise

    def _let_write(self, file: Path) -> None:
        """Let the group's members use a layer."""
        if self._group is not None:
            os.chown(file, -1, self._group)
            file.chmod(file.stat().st_mode & 0o777 | 0o660)

    def _let_read(self, chain: Sequence[Layer]) -> None:
        """Let the group's members read layers of a VM that may be somebody else's, and go on being so."""
        if self._group is None:
            return
        for layer in chain:
            found = layer.path.stat()
            if found.st_gid != self._group:
                os.chown(layer.path, -1, self._group)
                layer.path.chmod(found.st_mode & 0o707 | 0o040)

    def _require_room(self) -> None:
        free = shutil.disk_usage(self._store).free
        if free < _ROOM:
            raise NoSpace(self._store, free, _ROOM)

    # Who has the disk open

    @contextlib.contextmanager
    def _held(self, layers: Layers, monitor: Monitor | None) -> Iterator[Nodes]:
        """The QEMU that has the active layer open: the VM's, or one of our own, so that nobody else can open it.

        Ours reads nothing of the disk, and so needs no image. Raises DiskInUse, MonitorFailed.
        """
        chain = layers.chain()
        if monitor is not None:
            settle(monitor)
            nodes = Nodes(monitor)
            _lift(nodes, chain)
            for name in map(nodes.of, (layer.path for layer in chain[1:])):
                if name is not None and nodes.could_write(name):  # an agent died, or a job failed
                    nodes.write_no_more(name)
            yield nodes
        else:
            with _opened(layers.vm, {**_file(chain[0]), "backing": None}) as held:
                yield Nodes(held)

    # Layers that nobody needs

    def _is_untidy(self, layers: Layers) -> bool:
        """Whether there is a layer that nobody needs any more when what is read now has been read."""
        return layers.todo(fold=_is_deep(layers), readers=False) is not None

    def _tidy_if_possible(self, layers: Layers) -> None:
        try:
            self._tidy(layers, None)
        except (DriverError, OSError) as error:
            log.warning("VM %s: layers that its disk does not need stay until the next time: %s", layers.vm, error)

    def _tidy(self, layers: Layers, running: Nodes | None) -> None:
        """Get rid of all layers that nobody needs. Raises what keeps it from the next one."""
        fold, more = _is_deep(layers), True
        while more:
            with layers.locked():
                more = self._tidy_once(layers, running, fold=fold)

    def _tidy_once(self, layers: Layers, running: Nodes | None, *, fold: bool) -> bool:
        """Get rid of one layer that nobody needs; False if there is none."""
        step = layers.todo(fold=fold)
        if step is None:
            return False
        if step.upper is not None:
            self._merge(layers, layers.layer(step.lower), layers.layer(step.upper), running)
        if running is not None:
            _let_go(running, layers.file(step.lower))
        layers.remove(step.lower)
        return True

    def _merge(self, layers: Layers, lower: Layer, upper: Layer, nodes: Nodes | None) -> None:
        """Copy a layer into the one above it, which is over what the lower one was over when this returns."""
        with contextlib.ExitStack() as stack:
            if nodes is None or upper not in layers.chain():  # the VM's QEMU has no layers of other branches open
                nodes = Nodes(stack.enter_context(_opened(layers.vm, _node(layers.down_from(upper)))))
            try:
                stream(nodes, upper.path, lower.path, lower.backing)
            except MonitorFailed as error:
                if is_locked(error.why):
                    raise DiskInUse(layers.vm) from error
                raise
        if layers.layer(upper.number).backing != lower.backing:
            raise BadDisk(f"{upper.path} is still over {lower.path}")
        sync(upper.path)


def _number(vm: str, snapshots: Mapping[str, int], snapshot: str) -> int:
    """The layer of a snapshot. Raises SnapshotMissing."""
    if snapshot not in snapshots:
        raise SnapshotMissing(vm, snapshot)
    return snapshots[snapshot]


def _refuse_internal_snapshots(layers: Layers) -> None:
    """Raise NotPossible if the active layer has snapshots inside, which a hypervisor took."""
    active = layers.chain()[0].path
    if not read_header(active).snapshots:
        return
    shown = run(["qemu-img", "info", "-U", "-f", "qcow2", "--output=json", str(active)])
    names = ", ".join(str(one["name"]) for one in json.loads(shown.stdout).get("snapshots", ()))
    raise NotPossible(
        f"the disk of VM {layers.vm} has system snapshots, which its hypervisor took inside the file, and this would"
        f" lose them: delete {names} first, by virsh snapshot-delete, or if the VM is off by qemu-img snapshot -d NAME"
        f" {active}"
    )


def _held_above(vm: str, chain: list[Layer], snapshots: Mapping[str, int], since: str | None) -> list[Range]:
    """What a chain holds above the layer of a snapshot, or all that it holds.

    Raises SnapshotMissing, NotPossible, DiskInUse, CommandFailed, CommandTimedOut.
    """
    if since is not None:
        numbers, base = [layer.number for layer in chain], _number(vm, snapshots, since)
        if base not in numbers:
            raise NotPossible(
                f"VM {vm}: its disk, or the snapshot that was asked for, did not go on from snapshot {since}"
            )
        chain = chain[: numbers.index(base)]
    try:
        return allocated(_over(None, chain)) if chain else []
    except CommandFailed as error:
        if is_locked(error.stderr):
            raise DiskInUse(vm) from error
        raise


def _is_deep(layers: Layers) -> bool:
    return len(layers.chain()) > DEEP


def _file(layer: Layer) -> BlockNode:
    """A layer's node. What a guest discards becomes holes of the file, and reads as zeros also over other data."""
    return {"driver": "qcow2", "discard": "unmap", "file": {"driver": "file", "filename": str(layer.path)}}


def _node(chain: Sequence[Layer]) -> BlockNode:
    """The node of a layer with all below it; ``chain`` begins with the layer and ends with the lowest."""
    return _over(chain[-1].image, chain)


def _over(below: BlockNode | None, chain: Sequence[Layer]) -> BlockNode:
    """The node of a layer with others below it, and below the last of them something else, or nothing.

    All but the first have names, without which QEMU would not flush them (``stream``): of the file's path, since a QEMU
    may have several disks.
    """
    node: BlockNode = {}
    for layer in reversed(chain):
        name = {} if layer is chain[0] else {"node-name": named_after("layer", str(layer.path))}
        node = {**_file(layer), **name, "backing": node or below}
    return node


@contextlib.contextmanager
def _opened(vm: str, node: BlockNode) -> Iterator[Monitor]:
    """A QEMU of our own that has a node open. Raises DiskInUse, MonitorFailed."""
    with private_daemon() as monitor:
        try:
            open_node(monitor, _PRIVATE, node)
        except MonitorFailed as error:
            if is_locked(error.why):
                raise DiskInUse(vm) from error
            raise
        yield monitor


def _lift(nodes: Nodes, chain: Sequence[Layer]) -> None:
    """Have a VM's QEMU write to the first layer of the chain, if that is still another one. Raises MonitorFailed.

    A layer that was only added has no backing there yet.
    """
    names = [nodes.of(layer.path) for layer in chain]
    used = next((at for at, name in enumerate(names) if name is not None and nodes.backing(name)), None)
    if used is None:
        raise MonitorFailed("query-named-block-nodes", f"it does not have {chain[0].path} open")
    below = names[used]
    for layer, name in reversed(list(zip(chain[:used], names[:used], strict=True))):
        overlay = name or f"virtman-{secrets.token_hex(6)}"
        if name is None:
            open_node(nodes.monitor, overlay, {**_file(layer), "backing": None})
        nodes.monitor.execute("blockdev-snapshot", {"node": below, "overlay": overlay})
        nodes.opened(overlay, layer.path)
        below = overlay


def _let_go(nodes: Nodes, file: Path) -> None:
    """Have a VM's QEMU close a file that its disk is not over any more; its name may have kept it open."""
    name = nodes.of(file)
    if name is not None:
        nodes.monitor.execute("blockdev-del", {"node-name": name})
        nodes.look()


def _give_as(model: Path, file: Path) -> None:
    stat = model.stat()
    if (stat.st_uid, stat.st_gid) != (os.geteuid(), os.getegid()):
        os.chown(file, stat.st_uid, stat.st_gid)
    file.chmod(stat.st_mode & 0o7777)
