"""Commands that move VMs to other hosts."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import click

from virtman.cli import options
from virtman.cli.output import Failure, emit, progress, size_text

if TYPE_CHECKING:
    from virtman.moving import Destination


@click.command()
@click.argument("vm")
@click.option("--live", is_flag=True, help="Move it while it runs: there is no other way.")
@click.option("--to", metavar="URI", help="The other host's libvirt, e.g. qemu+ssh://b/system.")
@click.option(
    "--agent", metavar="COMMAND", help='What "virtman" is there. Default: "ssh HOST virtman", where URI names ssh.'
)
@click.option("--abort", is_flag=True, help="End a migration; a VM that went is destroyed there.")
@options.as_json
@click.pass_context
def migrate(
    context: click.Context, vm: str, to: str | None, agent: str | None, *, live: bool, abort: bool, as_json: bool
) -> None:
    """Move VM, which runs, to another host, disk and all; it is destroyed here when it goes on there.

    Its private data go as streams (see "virtman send"), its memory by libvirt. Asked again after anything went wrong,
    it goes on where it was. A VM that is off is moved by "virtman send" and "virtman receive".

    \b
    Example: virtman migrate web-1 --live --to qemu+ssh://root@b/system
             virtman migrate web-1 --abort
    """
    from virtman import moving

    with options.agent(context) as client:
        if abort:
            to = to or client.vm(vm).moved_to
            answer = moving.abort(client, _destination(agent, to), vm)
            emit(answer) if as_json else click.echo(f"{vm} is {answer.state}")
            return
        if to is None or not live:
            raise click.UsageError("say --live --to URI, or --abort")
        destination = _destination(agent, to)
        if destination is None:
            raise Failure(f"say with --agent what command is 'virtman' at {to}")
        with progress() as show:
            moved = moving.Migration(client, destination, vm, to, show).run()
    if as_json:
        emit({"moved": vm, "to": to, "sent": moved.sent, "downtime": round(moved.downtime, 3)})
    else:
        click.echo(f"{vm} runs at {to}: {size_text(moved.sent)} moved, it stood still for {moved.downtime:.2f} s")


def _destination(agent: str | None, uri: str | None) -> Destination | None:
    from virtman.moving import Destination, ssh

    command = shlex.split(agent) if agent else ssh(uri or "")
    return Destination(command) if command else None


@click.group()
def arrival() -> None:
    """What "virtman migrate" asks of the host that a VM moves to."""


@arrival.command()
@click.argument("vm")
@options.as_json
@click.pass_context
def begin(context: click.Context, vm: str, as_json: bool) -> None:
    """Make ready for VM, of which the standard input tells, and print the domain that libvirt is to make of it."""
    from pydantic import ValidationError

    from virtman.models import Traveller

    try:
        traveller = Traveller.model_validate_json(sys.stdin.buffer.read())
    except ValidationError as error:
        raise Failure(f"that is nothing of 'virtman migrate': {error.errors()[0]['msg']}") from error
    with options.agent(context) as client:
        answer = client.expect(vm, traveller)
    emit(answer) if as_json else click.echo(answer.domain)


@arrival.command()
@click.argument("vm")
@click.argument("image")
@options.as_json
@click.pass_context
def end(context: click.Context, vm: str, image: str, as_json: bool) -> None:
    """Receive what VM wrote last, a stream on the standard input, and let it go on. Its image is called IMAGE here."""
    with options.agent(context) as client:
        client.receive(vm, image, options.stream())
        answer = client.arrive(vm)
    emit(answer) if as_json else click.echo(f"{vm} is {answer.state}")


COMMANDS = (migrate, arrival)
