"""Commands about points in time of VMs' disks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from virtman.cli import options
from virtman.cli.output import Answer
from volt.groups import Group
from volt.printing import table
from volt.text import size_text

if TYPE_CHECKING:
    from virtman.client import AgentClient
    from virtman.models import Snapshot

HOW = {
    "frozen": "its guest had written all down",
    "crash": "as after a power cut, if the VM ran: no agent in its guest answered",
    "off": "the VM was off",
}


@click.group(cls=Group)
def snapshot() -> None:
    """Take snapshots of a VM's disk, and revert to them."""


@options.command(group=snapshot)
@options.vm
@click.argument("name")
def create(client: AgentClient, vm: str, name: str) -> Answer:
    """Take a snapshot NAME of the disk of VM; the VM goes on.

    The guest's file systems are frozen for that moment if QEMU's guest agent runs in it. Asked again, it answers the
    same.

    \b
    Example: virtman snapshot create web-1 before-upgrade
    """
    answer = client.take_snapshot(vm, name)
    return Answer(answer, f"{vm} has the snapshot {name}: {HOW.get(answer.state, answer.state)}")


@options.command("list", group=snapshot)
@options.vm
def list_snapshots(client: AgentClient, vm: str) -> Answer:
    """List the snapshots of VM as a tree; the disk has gone on from the one with a star.

    \b
    Example: virtman snapshot list web-1
    """
    found = client.snapshots(vm)
    rows = [
        [indent + one.name + (" *" if one.current else ""), f"{one.taken.astimezone():%Y-%m-%d %H:%M:%S}",
         size_text(one.size), one.state]
        for indent, one in _tree(found, None, 0)
    ]  # fmt: skip
    return Answer(found, partial(table, ["SNAPSHOT", "TAKEN", "SIZE", "STATE"], rows))


def _tree(found: Sequence[Snapshot], parent: str | None, depth: int) -> Iterator[tuple[str, Snapshot]]:
    """Each snapshot below its parent, and deeper only where it branches: most disks have one long line of them."""
    children = [one for one in found if one.parent == parent]
    deeper = depth + (len(children) > 1)
    for child in children:
        yield "  " * deeper, child
        yield from _tree(found, child.name, deeper)


@options.command(group=snapshot)
@options.vm
@options.snapshot
def revert(client: AgentClient, vm: str, name: str) -> Answer:
    """Revert the disk of VM, which must be off, to the snapshot NAME. What was written since is lost.

    \b
    Example: virtman stop web-1 && virtman snapshot revert web-1 before-upgrade && virtman start web-1
    """
    answer = client.revert(vm, name)
    return Answer(answer, f"the disk of {vm} is what it was at {name}")


@options.command(group=snapshot)
@options.vm
@options.snapshot
def delete(client: AgentClient, vm: str, name: str) -> Answer:
    """Delete the snapshot NAME of VM, which may run. What the disk and other snapshots need of it stays.

    \b
    Example: virtman snapshot delete web-1 before-upgrade
    """
    client.delete_snapshot(vm, name)
    return Answer({"deleted": name})
