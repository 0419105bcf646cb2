"""Commands that make other VMs and files of what a VM or an image holds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from virtman.cli import options
from virtman.cli.output import NOT_FOUND, Answer, Failure, progress
from virtman.cli.snapshots import HOW
from volt.text import size_text

if TYPE_CHECKING:
    from virtman.client import AgentClient


@options.command()
@options.vm
@click.argument("new")
@click.option(
    "--count",
    type=click.IntRange(1, 10_000),
    help="Make so many, named NEW-1, NEW-2 and so on, which are all the same.",
)
def clone(client: AgentClient, vm: str, new: str, count: int | None) -> Answer:
    """Create a disk for the VM NEW that holds what that of VM holds now, and print its path.

    Nothing is copied, and VM may run. Asked again, it prints the same path. What "virtman boot" starts from it gets a
    name, a MAC address and a NoCloud seed of its own.

    \b
    Example: virtman clone prepared worker --count 100
    """
    names = [new] if count is None else [f"{new}-{number}" for number in range(1, count + 1)]
    clones = client.clone(vm, names)
    return Answer(clones, "\n".join(one.disk.path for one in clones))


@options.command()
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--format", "image_format", type=click.Choice(["raw", "qcow2"]), default="raw", show_default=True)
@click.option("--image", is_flag=True, help="NAME is an image, also if a VM is called so.")
def export(client: AgentClient, name: str, file: Path, image_format: str, *, image: bool) -> Answer:
    """Write what the disk of the VM NAME holds now, or the image NAME, to a new FILE that needs no other.

    The VM may run: then FILE is a snapshot, see "virtman snapshot create". The agent writes it, and only the agent's
    user may read it.

    \b
    Example: virtman export web-1 /backup/web-1.qcow2 --format qcow2
    """
    with progress() as show:
        if not image and name not in (vm.name for vm in client.vms()):
            if name not in (one.name for one in client.images()):
                raise Failure(f"there is no VM {name!r} on this host, and no image of this name", NOT_FOUND)
            image = True
        write = client.export_image if image else client.export_vm
        answer = write(name, file.absolute(), image_format, show)
    how = f" ({HOW.get(answer.state, answer.state)})" if answer.state is not None else ""
    return Answer(answer, f"{answer.file}: a {answer.format} disk of {size_text(answer.size)}{how}")


@options.command()
@options.vm
@click.option("--snapshot", metavar="NAME", help="Send this snapshot, and not what the disk holds now.")
@click.option("--since", metavar="NAME", help="Only what has changed since this snapshot, which the receiver has.")
@click.option("--with-snapshots", is_flag=True, help="Also the snapshots before it, after that of --since.")
def send(client: AgentClient, vm: str, snapshot: str | None, since: str | None, *, with_snapshots: bool) -> Answer:
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
    with progress() as show:
        answer = client.send(vm, options.output(), snapshot, since, show, with_snapshots=with_snapshots)
    kept = f", {answer.snapshots} snapshots" if with_snapshots else ""
    said = f"sent {size_text(answer.total)}{kept} ({HOW.get(answer.state, answer.state)})"
    return Answer(answer, said, err=True)


@options.command()
@click.argument("vm")
@options.image
def receive(client: AgentClient, vm: str, image: str) -> Answer:
    """Read a stream of "virtman send" from the standard input, and make VM of it, whose image is called IMAGE here.

    A stream of what changed since a snapshot continues a VM that has this snapshot and has not changed since. VM is
    there when the stream was whole and right to its end; if not, all is as it was before.

    \b
    Example: ssh other virtman send web-1 | virtman receive web-1 debian-12
    """
    if sys.stdin.isatty():
        raise Failure("a stream is nothing that one types: read it from a file, or from 'virtman send'")
    with progress() as show:
        answer = client.receive(vm, image, options.stream(), show)
    return Answer(answer, answer.disk.path)
