"""Chains of layers in QEMU: opening them, switching a running QEMU to a new layer, merging layers.

Without a running VM a private daemon opens the layers. QEMU's locks on the files tell whether another program has the
disk open (QEMU: block/file-posix.c).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence

from drivers.base import BlockNode, Monitor
from drivers.errors import BadDisk, MonitorFailed
from drivers.host.durable import sync
from drivers.qemu.monitor import disk_in_use_if_locked, private_node
from drivers.qemu.nodes import Nodes, named_after
from drivers.qemu.streaming import settle, stream
from drivers.snapshot.layers import Layer, Layers

DEEP = 32
"""Layers. A disk has one more after each call that cloned it, and a change of a running VM's takes the longer the more
there are, with its guest held still. One with more than these gets a copy of its own of what it shares with clones."""


def node_of(chain: Sequence[Layer]) -> BlockNode:
    """The node of a layer with all below it; ``chain`` begins with the layer and ends with the lowest."""
    return node_over(chain[-1].image, chain)


def node_over(below: BlockNode | None, chain: Sequence[Layer]) -> BlockNode:
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
def held(layers: Layers, monitor: Monitor | None) -> Iterator[Nodes]:
    """The QEMU that has the active layer open: the VM's, or a private one, so that no other program can open it.

    A private one reads nothing of the disk, and so needs no image. Raises DiskInUse, MonitorFailed.
    """
    chain = layers.chain()
    if monitor is not None:
        settle(monitor)
        nodes = Nodes(monitor)
        switch(nodes, chain)
        for name in map(nodes.of, (layer.path for layer in chain[1:])):
            if name is not None and nodes.could_write(name):  # an agent died, or a job failed
                nodes.write_no_more(name)
        yield nodes
    else:
        with private_node(layers.vm, {**_file(chain[0]), "backing": None}) as private:
            yield Nodes(private)


def switch(nodes: Nodes, chain: Sequence[Layer]) -> None:
    """Have a VM's QEMU write to the first layer of the chain, unless it does. Raises MonitorFailed.

    A layer that an interrupted call added has no backing in QEMU yet.
    """
    names = [nodes.of(layer.path) for layer in chain]
    used = next((at for at, name in enumerate(names) if name is not None and nodes.backing(name)), None)
    if used is None:
        raise MonitorFailed("query-named-block-nodes", f"it does not have {chain[0].path} open")
    below = names[used]
    for layer, name in reversed(list(zip(chain[:used], names[:used], strict=True))):
        overlay = name or f"virtman-{secrets.token_hex(6)}"
        if name is None:
            nodes.monitor.execute("blockdev-add", {**_file(layer), "backing": None, "node-name": overlay})
        nodes.monitor.execute("blockdev-snapshot", {"node": below, "overlay": overlay})
        nodes.add(overlay, layer.path)
        below = overlay


def has_unneeded(layers: Layers) -> bool:
    """Whether there is a layer that nobody needs any more when what is read now has been read."""
    return layers.next_unneeded(fold=_is_deep(layers), readers=False) is not None


def remove_unneeded(layers: Layers, running: Nodes | None) -> None:
    """Remove all layers that nobody needs: copy each into the one above, or just delete it.

    ``running``: of the VM's QEMU. Raises what keeps it from the next one: DiskInUse, NoSpace, MonitorFailed, BadDisk.
    """
    fold, more = _is_deep(layers), True
    while more:
        with layers.locked():
            more = _remove_next(layers, running, fold=fold)


def _remove_next(layers: Layers, running: Nodes | None, *, fold: bool) -> bool:
    """Remove one layer that nobody needs; False if there is none."""
    step = layers.next_unneeded(fold=fold)
    if step is None:
        return False
    if step.upper is not None:
        _merge(layers, layers.layer(step.lower), layers.layer(step.upper), running)
    if running is not None and (name := running.of(layers.file(step.lower))) is not None:
        running.monitor.execute("blockdev-del", {"node-name": name})  # which its name may have kept open
        running.refresh()
    layers.remove(step.lower)
    return True


def _merge(layers: Layers, lower: Layer, upper: Layer, nodes: Nodes | None) -> None:
    """Copy a layer into the one above it, which is over what the lower one was over when this returns."""
    with contextlib.ExitStack() as stack:
        if nodes is None or upper not in layers.chain():  # the VM's QEMU has no layers of other branches open
            nodes = Nodes(stack.enter_context(private_node(layers.vm, node_of(layers.down_from(upper)))))
        with disk_in_use_if_locked(layers.vm):
            stream(nodes, upper.path, lower.path, lower.backing)
    if layers.layer(upper.number).backing != lower.backing:
        raise BadDisk(f"{upper.path} is still over {lower.path}")
    sync(upper.path)


def _is_deep(layers: Layers) -> bool:
    return len(layers.chain()) > DEEP


def _file(layer: Layer) -> BlockNode:
    """A layer's node. What a guest discards becomes holes of the file, and reads as zeros also over other data."""
    return {"driver": "qcow2", "discard": "unmap", "file": {"driver": "file", "filename": str(layer.path)}}
