"""Commands that move VMs to other hosts."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from virtman.cli import options
from virtman.cli.output import Answer, Failure, progress
from volt.text import size_text

if TYPE_CHECKING:
    from virtman.client import AgentClient
    from virtman.models import MigrationSource
    from virtman.moving import Destination, Moved


@options.command()
@options.vm
@click.option("--live", is_flag=True, help="Move it while it runs: there is no other way.")
@click.option("--to", metavar="URI", help="The other host's libvirt, e.g. qemu+ssh://b/system.")
@click.option(
    "--agent", metavar="COMMAND", help='What "virtman" is there. Default: "ssh HOST virtman", where URI names ssh.'
)
@click.option(
    "--abort", is_flag=True, help="End a migration; a VM that went, and does not go on there, comes back, off."
)
@click.option(
    "--force", is_flag=True, help="With --abort: not even ask there. It must be certain that it does not run there."
)
def migrate(
    client: AgentClient, vm: str, to: str | None, agent: str | None,
    *, live: bool, abort: bool, force: bool
) -> Answer:  # fmt: skip
    """Move VM, which runs, to another host, disk and all; it is destroyed here when it goes on there.

    Its private data go as streams (see "virtman send"), its memory by libvirt. Asked again after anything went wrong,
    it goes on where it was. A VM that is off is moved by "virtman send" and "virtman receive".

    \b
    Example: virtman migrate web-1 --live --to qemu+ssh://root@b/system
             virtman migrate web-1 --abort
    """
    with interrupted(vm):
        if abort:
            return _abort(client, vm, to, agent, force=force)
        if to is None or not live or force:
            raise click.UsageError("say --live --to URI, or --abort")
        return _move(client, vm, to, agent)


def _move(client: AgentClient, vm: str, to: str, agent: str | None) -> Answer:
    from virtman import moving

    destination = _destination(agent, to)
    if destination is None:
        raise Failure(f"say with --agent what command is 'virtman' at {to}")
    with progress() as show:
        moved = moving.Migration(client, destination, vm, to, show).run()
    value = {"moved": vm, "to": to, "sent": moved.sent, "downtime": round(moved.downtime, 3)}
    return Answer(value, migrated(vm, to, moved))


def migrated(vm: str, to: str, moved: Moved) -> str:
    """What is said of a VM that goes on at the other host."""
    return f"{vm} runs at {to}: {size_text(moved.sent)} moved, it stood still for {moved.downtime:.2f} s"


def _abort(client: AgentClient, vm: str, to: str | None, agent: str | None, *, force: bool) -> Answer:
    from virtman import moving

    went = client.vm(vm).moved_to
    if went is not None and to not in (None, went):
        raise Failure(f"vm {vm!r} went to {went}, and not to {to}")
    answer = moving.abort(client, _destination(agent, to or went), vm, force=force)
    return Answer(answer, f"{vm} is {answer.state}")


@contextmanager
def interrupted(vm: str) -> Iterator[None]:
    """Whatever ends this command is taken for Ctrl-C, after which what can be undone is."""
    try:
        with taken_for_ctrl_c():
            yield
    except KeyboardInterrupt as error:
        notes = getattr(error, "__notes__", [])
        raise Failure("; ".join([f"interrupted: 'virtman list' says where vm {vm!r} is", *notes])) from error


@contextmanager
def taken_for_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt also for what else ends a command. Under nohup(1) it goes on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heard = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in heard:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


def _destination(agent: str | None, uri: str | None) -> Destination | None:
    from virtman.moving import Destination, ssh

    command = shlex.split(agent) if agent else ssh(uri or "")
    return Destination(command) if command else None


@click.group(hidden=True)
def arrival() -> None:
    """What "virtman migrate" asks of the host that a VM moves to."""


def _migration_source() -> MigrationSource:
    """What the standard input tells of a VM."""
    from pydantic import ValidationError

    from virtman.models import MigrationSource

    try:
        return MigrationSource.model_validate_json(sys.stdin.buffer.read())
    except ValidationError as error:
        raise Failure(f"that is nothing of 'virtman migrate': {error.errors()[0]['msg']}") from error


@options.command(group=arrival)
def check(client: AgentClient) -> Answer:
    """Check whether a VM can be migrated here; the standard input describes the VM."""
    migration_source = _migration_source()
    client.check_arrival(migration_source)
    return Answer({"possible": True}, "it can come")


@options.command(group=arrival)
@click.argument("vm")
def begin(client: AgentClient, vm: str) -> Answer:
    """Prepare for VM, which the standard input describes, and print the domain that libvirt is to make of it."""
    migration_source = _migration_source()
    answer = client.expect(vm, migration_source)
    return Answer(answer, answer.domain)


@options.command("give-up", group=arrival)
@click.argument("vm")
@click.argument("snapshots", nargs=-1, required=True)
def give_up(client: AgentClient, vm: str, snapshots: tuple[str, ...]) -> Answer:
    """Destroy what has arrived of VM, which has one of SNAPSHOTS, unless VM runs here already."""
    answer = client.give_up_arrival(vm, snapshots)
    return Answer(answer, f"{vm}: {answer.state}")


@options.command(group=arrival)
@click.argument("vm")
@click.argument("image")
def end(client: AgentClient, vm: str, image: str) -> Answer:
    """Receive what VM wrote last, a stream on the standard input, and resume VM. Its image is called IMAGE here."""
    client.receive(vm, image, options.stream())
    answer = client.arrive(vm)
    return Answer(answer, f"{vm} is {answer.state}")
