"""A VM's private disk: qcow2 layers on top of the image that this host serves.

Each file's header names its backing, so that any QEMU opens the disk by its path alone and holds its requests while the
chunk store restarts.

A snapshot is a layer that is written to no more: a new one over it becomes the active one, unless that below the active
one holds the same, because nobody wrote since. First the disk's path leads there, then a running QEMU is switched, then
the snapshot gets its name; so whoever opens the disk after a crash writes to the new layer, and a QEMU that was not
switched is when the next call finds it so. A layer that neither is active nor a snapshot's is copied into the one over
it, or just deleted if nothing or something else is there (``next_step``).

A hypervisor may keep snapshots inside the active layer ("virsh snapshot-create": a system snapshot). They cannot go
along into another layer or another disk, so no call changes the layers while there are any.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Iterator, Mapping

from drivers.base import Device, Monitor, Place, Range
from drivers.door import door
from drivers.errors import BadDevice, BadDisk, DiskInUse, DriverError, NotPossible, SnapshotMissing
from drivers.host.command import run
from drivers.host.space import Room, shortage
from drivers.names import checked, is_name
from drivers.needs import QEMU_IMG, QEMU_STORAGE_DAEMON, Needs
from drivers.qemu.monitor import SETPRIV, disk_in_use_if_locked
from drivers.qemu.nodes import Nodes
from drivers.qemu.qcow2file import is_empty, read_header
from drivers.snapshot.chains import has_unneeded, held, node_of, node_over, remove_unneeded, switch
from drivers.snapshot.layers import Layer, Layers, remove_orphans
from drivers.snapshot.layerstore import READING, LayerStore
from drivers.snapshot.ranges import allocated, require_size

log = logging.getLogger(__name__)

DEEPEST = 200
"""Layers. With so many QEMU holds a guest still for seconds at each change; only snapshots make a disk as deep."""


@door
class Qcow2Disks:
    """Disks of VMs in ``<state>/snapshots``.

    The calls raise what VmDiskDriver says, and DiskInUse, MonitorFailed, CommandFailed; BadDisk also if files are not
    as they were made here.
    """

    moves_live = True

    needs = Needs(tools=(QEMU_IMG, QEMU_STORAGE_DAEMON, SETPRIV))

    def __init__(self, place: Place) -> None:
        self._room = Room(place.state, place.reserve)
        self._store = LayerStore(place.state / "snapshots", place.group)
        self._store.folder.mkdir(parents=True, exist_ok=True)
        remove_orphans(self._store)  # there is one agent at a time

    def create(self, vm: str, origin: Device, size: int) -> Device:
        """``origin`` is a block node (``ChunkSource.device``); else BadDevice is raised."""
        layers = self._layers(vm)
        if layers.exist():
            return self.open(vm)
        if origin.node is None:
            raise BadDevice(f"VM {vm}: the origin has no QEMU block node")
        require_size(vm, origin.size, size)
        layers.delete()
        try:
            layers.activate(layers.make_lowest(origin.node, size))
        except (DriverError, OSError):
            layers.delete()
            raise
        return self.open(vm)

    def open(self, vm: str) -> Device:
        """The disk as its files describe it."""
        layers = self._layers(vm)
        chain = layers.chain()
        return Device(size=chain[0].size, path=layers.path, node=node_of(chain))

    def delete(self, vm: str) -> None:
        """The disk may be half made."""
        self._layers(vm).delete()

    def rename(self, vm: str, new: str) -> Device:
        old, renamed = self._layers(vm), self._layers(new)
        if old.exist() or not renamed.exist():
            if renamed.exist():
                raise BadDisk(f"VM {new} has a disk, and the one of VM {vm} cannot get its name")
            with held(old, None):
                pass  # nobody else has the disk open
            renamed.delete()
            old.rename(renamed)
        return self.open(new)

    def resize(self, vm: str, size: int, monitor: Monitor | None) -> Device:
        layers = self._layers(vm)
        active = layers.chain()[0]
        require_size(vm, active.size, size)
        if size != active.size:
            with held(layers, monitor) as nodes:
                nodes.monitor.execute("block_resize", {"node-name": nodes.demand(active.path), "size": size})
        return self.open(vm)

    def take(self, vm: str, snapshot: str, monitor: Monitor | None) -> Device:
        layers = self._layers(vm)
        checked(snapshot)
        if monitor is not None or snapshot not in layers.snapshots():
            with held(layers, monitor) as nodes:
                if snapshot not in layers.snapshots():
                    _refuse_internal_snapshots(layers)
                    _keep(layers, snapshot, nodes if monitor is not None else None)
        if monitor is None:  # a guest may be held still until this returns; the next ``drop`` removes them then
            _try_to_remove_unneeded(layers)
        return self.open(vm)

    def revert(self, vm: str, snapshot: str) -> Device:
        layers = self._layers(vm)
        kept = layers.layer(_number(layers.vm, layers.snapshots(), checked(snapshot)))
        with held(layers, None):
            _refuse_internal_snapshots(layers)
            layers.activate(layers.make_over(kept))
        _try_to_remove_unneeded(layers)
        return self.open(vm)

    def drop(self, vm: str, snapshot: str, monitor: Monitor | None) -> None:
        """Once the snapshot is forgotten an error says that not all is freed; the next call goes on with it."""
        layers = self._layers(vm)
        snapshots = layers.snapshots()
        if snapshots.pop(checked(snapshot), None) is None and not has_unneeded(layers):
            return
        with held(layers, monitor) as nodes:
            _refuse_internal_snapshots(layers)
            if snapshots != layers.snapshots():
                layers.write_snapshots(snapshots)
        remove_unneeded(layers, nodes if monitor is not None else None)
        if has_unneeded(layers):  # which others read meanwhile
            raise DiskInUse(vm)

    def snapshots(self, vm: str) -> frozenset[str]:
        return frozenset(self._layers(vm).snapshots())

    def clone(self, vm: str, snapshot: str, new: str) -> Device:
        """The clone has symlinks to the layers of its source."""
        source, clone = self._layers(vm), self._layers(new)
        number = _number(vm, source.snapshots(), checked(snapshot))
        if clone.exist():
            return self.open(new)
        try:
            with source.locked():
                clone.delete()
                shared = source.down_from(source.layer(_number(vm, source.snapshots(), snapshot)))
                self._store.let_read(layer.path for layer in shared)
                clone.share(shared)
            clone.activate(clone.make_over(clone.layer(number), of_another=True))
        except (DriverError, OSError):
            clone.delete()
            raise
        return self.open(new)

    @contextlib.contextmanager
    def reading(self, vm: str, snapshot: str) -> Iterator[Device]:
        """QEMU's programs read the layers of the snapshot by links."""
        with self._linked(self._layers(vm), checked(snapshot)) as (chain, _snapshots):
            yield Device(chain[0].size, chain[0].path, node_of(chain))

    def changes(self, vm: str, snapshot: str | None, since: str | None) -> list[Range]:
        """What the layers above that of ``since`` hold, or all layers. NotPossible if that snapshot is not below.

        The layers of a snapshot are read by links, so that other snapshots may come and go meanwhile.
        """
        layers = self._layers(vm)
        for name in (name for name in (snapshot, since) if name is not None):
            checked(name)
        if snapshot is None:
            return _allocated_above(vm, layers.chain(), layers.snapshots(), since)
        with self._linked(layers, snapshot) as (chain, snapshots):
            return _allocated_above(vm, chain, snapshots, since)

    def existing(self) -> frozenset[str]:
        """VMs with a disk, whole or half made."""
        disks = self._store.disks
        return frozenset(path.name for path in disks.iterdir() if is_name(path.name))  # not "lost+found", say

    def spare(self) -> int:
        """What the file system has to spare."""
        return self._room.spare(self._store.folder)

    def trouble(self) -> str:
        """Whether the file system is running full under the disks."""
        reserve = self._room.reserve(self._store.folder)
        said = shortage(self._store.folder, reserve + reserve // 16) if self.existing() else ""
        return f"{said}; caches take in little more, or nothing" if said else ""

    def _layers(self, vm: str) -> Layers:
        return Layers(self._store, checked(vm))

    @contextlib.contextmanager
    def _linked(self, layers: Layers, snapshot: str) -> Iterator[tuple[list[Layer], dict[str, int]]]:
        """The layers of a snapshot by links, so that they stay, and nothing is copied into them; and what the layer of
        each snapshot was when they were linked. Raises VmDiskMissing, SnapshotMissing, BadDisk.
        """
        links = Layers(self._store, f"{READING}{secrets.token_hex(8)}")
        _number(layers.vm, layers.snapshots(), snapshot)  # a disk that is not there has no folder to lock
        try:
            with layers.locked():
                snapshots = layers.snapshots()
                number = _number(layers.vm, snapshots, snapshot)
                links.share(layers.down_from(layers.layer(number)))
            yield links.down_from(links.layer(number)), snapshots
        finally:
            links.delete()


def _keep(layers: Layers, snapshot: str, running: Nodes | None) -> None:
    """Let a snapshot keep what the disk holds now. ``running``: of the VM's QEMU. Raises NotPossible."""
    chain = layers.chain()
    kept, *lower = chain
    if running is None and lower and lower[0].size == kept.size and is_empty(kept.path):
        kept = lower[0]
    elif len(chain) >= DEEPEST:
        raise NotPossible(
            f"the disk of VM {layers.vm} has {len(chain)} layers, and gets no more: delete snapshots of it first"
        )
    else:
        layers.activate(layers.make_over(kept))
        if running is not None:
            switch(running, layers.chain())
    layers.write_snapshots({**layers.snapshots(), snapshot: kept.number})


def _try_to_remove_unneeded(layers: Layers) -> None:
    try:
        remove_unneeded(layers, None)
    except (DriverError, OSError) as error:
        log.warning("VM %s: layers that its disk does not need stay until the next time: %s", layers.vm, error)


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


def _allocated_above(vm: str, chain: list[Layer], snapshots: Mapping[str, int], since: str | None) -> list[Range]:
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
    with disk_in_use_if_locked(vm):
        return allocated(node_over(None, chain)) if chain else []
