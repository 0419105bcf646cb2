"""Commands about this host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from virtman.cli import options
from virtman.cli.output import Answer
from volt.printing import table
from volt.text import size_text

if TYPE_CHECKING:
    from virtman.client import AgentClient
    from virtman.models import CachedDevice, Stack, Status, Volume

VOLUME_TROUBLE = {"failed": "has failed", "missing": "is missing"}
"""What is said of a volume in such a state."""


@options.command()
def status(client: AgentClient) -> Answer:
    """Show this host's images, its link to Volt, its devices, and all that fails and why.

    Troubles go to standard error, and the exit code is 0 even then.
    """
    answer = client.status()
    return Answer(answer, partial(_print_status, answer))


def _print_status(answer: Status) -> None:
    room = f"{size_text(answer.disks.free)} of {size_text(answer.disks.total)} free"
    link = "connected" if answer.volt.connected else f"NOT connected: {answer.volt.trouble}"
    click.echo(f"host {answer.host}, Volt at {answer.volt.url} {link}; VMs run with {answer.accel.use}; {room}")
    table(
        ["IMAGE", "ROLE", "PHASE", "SLOT", "FETCHED", "CACHE HITS", "VMS", "PATHS"], [_stack(s) for s in answer.images]
    )
    if answer.cached_devices:
        print_devices(answer.cached_devices)
    for line in (*_phase(answer), *_trouble(answer)):
        click.echo(line, err=True)


def print_devices(found: Sequence[CachedDevice]) -> None:
    """Print a table of devices that are read through the cache."""
    columns = ("DEVICE", "PATH", "SIZE", "STATE", "HITS", "MISSES", "FROM CACHE")
    rows = [[d.device, d.path, size_text(d.size), d.state, d.hits, d.misses, size_text(d.cache_bytes)] for d in found]
    table(columns, rows)


def _stack(stack: Stack) -> list[Any]:
    phase, hydration = stack.phase if stack.serving else f"{stack.phase}, NOT served", stack.hydration
    if hydration is not None:
        phase += ", whole" if hydration.whole else f", {100 * hydration.done // hydration.total}% hydrated"
    if stack.verified is False:
        phase += ", unverified"
    return [
        stack.name, stack.role, phase, stack.slot,
        size_text(stack.fetched_bytes), size_text(stack.cache_hit_bytes), len(stack.vms),
        ", ".join(f"{path.host} ({path.state})" for path in stack.paths) or (stack.in_place and stack.in_place.path)
        or "-",
    ]  # fmt: skip


def _phase(status: Status) -> Iterator[str]:
    if status.suspended:
        yield "this host is suspended: nothing is served or looked after until its agent is started again"
    if status.repairing:
        yield "the agent compares records with the host; what is not there yet may come back"


def _trouble(status: Status) -> Iterator[str]:
    for orphan in status.orphans:
        yield f"the disk of {orphan} has no record; it is left alone"
    for name, why in status.damaged.items():
        yield f"{name}: {why}; all that it may need is left alone"
    for what, why in status.troubles.items():
        yield f"{what}: {why}; this is tried again"
    if status.disks.trouble:
        yield f"VMs' disks: {status.disks.trouble}"
    yield from _trouble_of_volumes(status.cache_volumes)
    for device in status.cached_devices:
        if device.state == "lost":
            yield (
                f"{device.device} was read through the cache before this host was started; attach it again, or forget"
                f" it: virtman cache detach {device.device}"
            )
    for death in status.deaths:
        now = "it works again" if death.running else "it DOES NOT WORK now"
        yield f"the agent's thread {death.thread} died {death.times} times, last of {death.error}; {now}"


def _trouble_of_volumes(volumes: Sequence[Volume]) -> Iterator[str]:
    for volume in volumes:
        if volume.state in VOLUME_TROUBLE:
            yield f"the cache volume {volume.path} {VOLUME_TROUBLE[volume.state]}; see: virtman cache list"
        if volume.trouble:
            yield f"the cache volume {volume.path}: {volume.trouble}"


@options.command()
@click.option("--dry-run", is_flag=True, help="Change nothing; say what would be removed.")
def gc(client: AgentClient, dry_run: bool) -> Answer:
    """Remove unused stacks, caches and published files.

    \b
    Example: virtman gc --dry-run
    """
    answer = client.gc(dry_run=dry_run)
    named = f": {', '.join(answer.stacks)}" if answer.stacks else ""
    lines = [
        f"would free {size_text(answer.freed_bytes)} and remove {len(answer.stacks)} stacks{named}"
        if dry_run
        else f"removed {len(answer.stacks)} stacks, freed {size_text(answer.freed_bytes)}"
    ]
    lines += [
        f"kept {image}: Volt does not list it, but other hosts read it when it did;"
        f" publish it again, or give it up: virtman unpublish {image}"
        for image in answer.kept
    ]
    return Answer(answer, "\n".join(lines))


@options.command()
def repair(client: AgentClient) -> Answer:
    """Compare this host with the agent's records; finish or undo what was cut off."""
    answer = client.repair()
    done = {"images": answer.images, "orphans": answer.orphans, "vms": answer.vms}
    done |= {"devices": answer.devices} if answer.devices else {}
    said = "; ".join(f"{kind}: {', '.join(names) or 'nothing to do'}" for kind, names in done.items())
    return Answer(answer, said)


@options.command()
@click.option("--force", is_flag=True, help="Even while VMs run; their reads wait until the agent is started again.")
def suspend(client: AgentClient, force: bool) -> Answer:
    """Stop serving images, before a reboot; the agent's next start brings them back with their caches."""
    client.suspend(force=force)
    return Answer({"suspended": True})


@options.command(asks_agent=False)
@click.option(
    "--kernel", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Default: the newest in /boot."
)
def accel(kernel: Path | None) -> Answer:
    """Prove whether KVM works here, by booting a Linux kernel with it."""
    import tempfile

    from virtman.accel import choose_accel

    with tempfile.TemporaryDirectory() as folder:
        found = choose_accel(kernel, Path(folder) / "accel.json")
    return Answer({"accel": found.use, "reason": found.reason}, f"{found.use}: {found.reason}")


@options.command(asks_agent=False)
@options.stack
@options.drivers
@options.address
@options.state
@options.volt
@options.libvirt
def doctor(stack: str, address: str | None, state: Path, volt: str, libvirt: str, **others: str | None) -> Answer:
    """Show what this machine has of all that the stacks need, and how to install the rest.

    It looks as an agent with the same settings would, needs none and changes nothing. Exit code 0 if the stack can run
    here, else 1; also 1 if you may not read what decides that.

    \b
    Example: virtman doctor --stack kernel
    """
    from virtman.doctor import advice, examine, rows
    from virtman.stackchoice import known_address

    found = examine(stack, others, state, address or known_address(volt, state), libvirt)

    def show() -> None:
        table(["STACK", "LAYER", "DRIVER", "THERE", "MISSING"], list(rows(found)))
        click.echo()
        for line in advice(found):
            click.echo(line)

    return Answer(found.as_json(), show, code=0 if found.runs else 1)
