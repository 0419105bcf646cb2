"""Commands that make other VMs and files of what a VM or an image holds."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from virtman.cli import options
from virtman.cli.output import NOT_FOUND, Failure, emit, progress
from virtman.cli.snapshots import HOW
from volt.text import size_text


@click.command()
@options.vm
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
                raise Failure(f"there is no VM {name!r} on this host, and no image of this name", NOT_FOUND)
            image = True
        write = client.export_image if image else client.export_vm
        answer = write(name, file.absolute(), image_format, show)
    if as_json:
        emit(answer)
    else:
        how = f" ({HOW.get(answer.state, answer.state)})" if answer.state is not None else ""
        click.echo(f"{answer.file}: a {answer.format} disk of {size_text(answer.size)}{how}")


@click.command()
@options.vm
@click.option("--snapshot", metavar="NAME", help="Send this snapshot, and not what the disk holds now.")
@click.option("--since", metavar="NAME", help="Only what has changed since this snapshot, which the receiver has.")
@click.option("--with-snapshots", is_flag=True, help="Also the snapshots before it, after that of --since.")
@options.as_json
@click.pass_context
def send(
    context: click.Context, vm: str, snapshot: str | None, since: str | None, *, with_snapshots: bool, as_json: bool
) -> None:
    """Write what the disk of VM has besides its image to the standard output, for "virtman receive" on another host.

    The VM may run: then it is a snapshot that is sent, see "virtman snapshot create". A summary goes to the standard
    error, with --json as JSON.

    \b
    Example:
      virtman snapshot create web-1 first
      virtman send web-1 --snapshot first | ssh other virtman receive web-1 debian-12
      virtman stop web-1 && virtman send web-1 --since first | ssh other virtman receive web-1 debian-12
    """
    if sys.stdout.isatty():
        raise Failure("a stream is nothing for a terminal: write it to a file, or into 'virtman receive'")
    with options.agent(context) as client, progress() as show:
        answer = client.send(vm, options.output(), snapshot, since, show, with_snapshots=with_snapshots)
    if as_json:
        click.echo(answer.model_dump_json(indent=2), err=True)
    else:
        kept = f", {answer.snapshots} snapshots" if with_snapshots else ""
        click.echo(f"sent {size_text(answer.total)}{kept} ({HOW.get(answer.state, answer.state)})", err=True)


@click.command()
@click.argument("vm")
@options.image
@options.as_json
@click.pass_context
def receive(context: click.Context, vm: str, image: str, as_json: bool) -> None:
    """Read a stream of "virtman send" from the standard input, and make VM of it, whose image is called IMAGE here.

    A stream of what changed since a snapshot continues a VM that has this snapshot and has not changed since. VM is
    there when the stream was whole and right to its end; if not, all is as it was before.

    \b
    Example: ssh other virtman send web-1 | virtman receive web-1 debian-12
    """
    if sys.stdin.isatty():
        raise Failure("a stream is nothing that one types: read it from a file, or from 'virtman send'")
    with options.agent(context) as client, progress() as show:
        answer = client.receive(vm, image, options.stream(), show)
    emit(answer) if as_json else click.echo(answer.disk.path)


COMMANDS = (clone, export, send, receive)
