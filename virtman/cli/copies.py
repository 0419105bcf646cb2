"""Commands that make other VMs and files of what a VM or an image holds."""

from __future__ import annotations

from pathlib import Path

import click

from virtman.cli import options
from virtman.cli.output import Failure, emit, progress, size_text
from virtman.cli.snapshots import HOW


@click.command()
@click.argument("vm")
@click.argument("new")
@click.option(
    "--count",
    type=click.IntRange(1, 10_000),
    help="Make so many, named NEW-1, NEW-2 and so on, which are all the same.",
)
@options.as_json
@click.pass_context
def clone(context: click.Context, vm: str, new: str, count: int | None, as_json: bool) -> None:
    """Create a disk for the VM NEW that holds what that of VM holds now, and print its path.

    Nothing is copied, and VM may run. Asked again, it prints the same path. What "virtman boot" starts from it gets a
    name, a MAC address and a NoCloud seed of its own.

    \b
    Example: virtman clone prepared worker --count 100
    """
    names = [new] if count is None else [f"{new}-{number}" for number in range(1, count + 1)]
    with options.agent(context) as client:
        clones = client.clone(vm, names)
    if as_json:
        emit(clones)
        return
    for one in clones:
        click.echo(one.disk.path)


@click.command()
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--format", "image_format", type=click.Choice(["raw", "qcow2"]), default="raw", show_default=True)
@click.option("--image", is_flag=True, help="NAME is an image, also if a VM is called so.")
@options.as_json
@click.pass_context
def export(context: click.Context, name: str, file: Path, image_format: str, *, image: bool, as_json: bool) -> None:
    """Write what the disk of the VM NAME holds now, or the image NAME, to a new FILE that needs no other.

    The VM may run: then FILE is a snapshot, see "virtman snapshot create". The agent writes it, and only the agent's
    user may read it.

    \b
    Example: virtman export web-1 /backup/web-1.qcow2 --format qcow2
    """
    with options.agent(context) as client, progress() as show:
        if not image and name not in (vm.name for vm in client.vms()):
            if name not in (one.name for one in client.images()):
                raise Failure(f"there is no VM {name!r} on this host, and no image of this name")
            image = True
        write = client.export_image if image else client.export_vm
        answer = write(name, file.absolute(), image_format, show)
    if as_json:
        emit(answer)
    else:
        how = f" ({HOW.get(answer.state, answer.state)})" if answer.state is not None else ""
        click.echo(f"{answer.file}: a {answer.format} disk of {size_text(answer.size)}{how}")


COMMANDS = (clone, export)
