"""Commands that time what a host does stage by stage, and say what to tune."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from virtman.cli import options
from virtman.cli.deploy import keep, request, travel
from virtman.cli.options import F
from virtman.cli.output import Answer, Failure, progress
from virtman.errors import BadRequest, VirtmanError
from volt.groups import Group
from volt.printing import table
from volt.text import size_text

if TYPE_CHECKING:
    from virtman.client import AgentClient
    from virtman.staging import Result


@click.group(cls=Group)
def bench() -> None:
    """Time boots and deployments stage by stage, and say what cost most."""


out: Callable[[F], F] = click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
    help="Write result.json and plot.svg there.",
)  # fmt: skip


def _counts(_context: click.Context, _option: click.Parameter, value: str) -> list[int]:
    if not all(each.isdecimal() and 0 < int(each) <= 1000 for each in value.split(",")):
        raise click.BadParameter(f"{value!r} is no number of VMs, and no list of such as 1,2,4")
    return [*dict.fromkeys(map(int, value.split(",")))]


@options.command(group=bench)
@options.image
@click.option("--vms", type=click.IntRange(1), default=1, show_default=True, help="How many; all run at the end.")
@click.option(
    "--parallel",
    default="1",
    show_default=True,
    metavar="N,…",
    callback=_counts,
    help="VMs at a time; several numbers are tried in turn.",
)
@click.option("--memory", type=click.IntRange(min=32), default=1024, show_default=True, help="MiB.")
@click.option("--cpus", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--network", default="user", show_default=True, help='As for "virtman boot".')
@click.option(
    "--message",
    default="login:",
    show_default=True,
    help="What the serial console shows when a VM is up; '': a VM is up when libvirt says that it runs.",
)
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=300, show_default=True,
    help="Seconds until the message.",
)  # fmt: skip
@out
def boot(
    client: AgentClient, image: str, *, vms: int, parallel: list[int], message: str, timeout: float, out: Path | None,
    **how: Any,
) -> Answer:  # fmt: skip
    """Boot new VMs of IMAGE on this host, time each stage, and destroy the VMs, also after Ctrl-C.

    With several numbers of --parallel a VM boots before all others, so that each wave finds the image attached. A wave
    of another host is timed there; "virtman bench report" then puts the results together. The exit code is 1 if a VM
    did not come up.

    \b
    Examples:
      virtman bench boot debian-12 --vms 4
      virtman bench boot debian-12 --vms 16 --parallel 1,2,4,8 --out /tmp/bench
    """
    from virtman.bench import Boots, wave
    from virtman.cli.migrate import taken_for_ctrl_c
    from virtman.staging import Result

    status, begun = client.status(), datetime.now(UTC)
    attached = "attached" if image in {one.name for one in status.images} else "not attached"
    notes, rounds = [f"image {image} was {attached} here before"], []
    boots = Boots(image, vms, how, message, timeout)
    with taken_for_ctrl_c():
        if len(parallel) > 1:
            notes.append("one VM had booted before these waves")
            wave(client, replace(boots, count=1), 1)
        for at_once in parallel:
            rounds.append(wave(client, boots, at_once))
            if sys.stderr.isatty():
                click.echo(f"{rounds[-1].label}: all after {rounds[-1].seconds:.1f} s", err=True)
    result = Result(kind="boot", image=image, host=status.host, begun=begun, rounds=rounds, notes=notes)
    return _answer(result, out)


@options.command(group=bench)
@options.image
@travel
@keep(1)
@out
def deploy(client: AgentClient, image: str, keep: float, *, out: Path | None, **how: Any) -> Answer:
    """Deploy IMAGE to hosts as "virtman deploy" does, and time each host by stages.

    Hosts that have all of IMAGE already are left out. To time another method, first let the image go on each host:
    "virtman hydrate IMAGE --cancel", then "virtman gc" until it says that the stack is removed. Without that only the
    first method moves anything. If this command is interrupted, the deployment goes on.

    \b
    Examples:
      virtman bench deploy debian-12 --all
      virtman bench deploy debian-12 --to node-1,node-2 --method unicast --parallel 2 --out /tmp/unicast
    """
    from virtman.bench import follow
    from virtman.staging import Result, Round

    begun, here = datetime.now(UTC), client.status().host
    wanted = request(image, keep, **how)
    had = {host.name for host in client.hosts() if image in host.whole}
    made = client.deploy(wanted)
    had = {host.host for host in made.hosts if host.host in had or host.state == "whole"}
    if len(had) == len(made.hosts):
        raise Failure(
            f"all of these hosts have all of {image}, so nothing would travel; let it go there first: virtman hydrate"
            f" {image} --cancel, then virtman gc"
        )
    try:
        with progress() as show:
            ended, runs = follow(client, made.id, had, show, partial(click.echo, err=True))
    except VirtmanError as error:
        raise Failure(f"{error}; the deployment goes on: virtman deployments {made.id}") from error
    notes = [f"{len(had)} of {len(made.hosts)} hosts had all of {image} before, and are left out"] if had else []
    notes += [f"{run.name} had {run.there:.0%} of it when Volt heard of it first" for run in runs if run.there > 0.01]
    notes += [f"{leg.source} sent {size_text(leg.sent)}" for leg in ended.legs]
    notes += [f"auto chose {ended.method}: {ended.why}"] if ended.why else []
    label = _label(ended.method, limit=how["limit"], parallel=how["parallel"])
    rounds = [Round(label=label, runs=runs)]
    return _answer(
        Result(kind="deploy", image=image, host=here, begun=begun, rounds=rounds, legs=ended.legs, notes=notes), out
    )


def _label(method: str, *, limit: int | None, parallel: int) -> str:
    """What differs between deployments that are compared."""
    turns = f", {parallel} at a time" if method == "unicast" else ""
    return method + turns + (f", at most {size_text(limit)} a second" if limit is not None else "")


@options.command(group=bench, asks_agent=False)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@out
def report(files: Sequence[Path], *, out: Path | None) -> Answer:
    """Put together FILES, each the result.json of a host or a method.

    \b
    Example: virtman bench report node-1/result.json node-2/result.json --out /tmp/both
    """
    from virtman.staging import merged

    return _answer(merged([_read(file) for file in files]), out)


def _read(file: Path) -> Result:
    from pydantic import ValidationError

    from virtman.staging import Result

    try:
        return Result.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise BadRequest(f"{file} is no result of virtman bench: {error}") from error


def _answer(result: Result, out: Path | None) -> Answer:
    from virtman.staging import cost_most

    result = result.model_copy(update={"cost_most": cost_most(result)})
    if out is not None:
        _write(result, out)
    failed = any(run.error for each in result.rounds for run in each.runs)
    return Answer(result, lambda: _show(result), code=1 if failed else 0)


def _write(result: Result, folder: Path) -> None:
    from virtman.stageplot import plot

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(result.model_dump_json(indent=2) + "\n")
        (folder / "plot.svg").write_text(plot(result))
    except OSError as error:
        raise Failure(f"cannot write the result: {error}") from error


def _show(result: Result) -> None:
    from virtman.staging import fastest, figures

    for note in result.notes:
        click.echo(note)
    for each in result.rounds:
        click.echo(f"{each.label}: {len(each.good)} of {len(each.runs)} in {each.seconds:.2f} s")
        for run in each.runs:
            if run.error:
                click.echo(f"  {run.name}: {run.error}")
    best = fastest(result.rounds)
    if best is None:
        return
    if len(result.rounds) > 1:
        click.echo(f"fastest: {best.label}")
    rows = [
        [one.stage.name, f"{one.median:.2f} s", f"{one.p90:.2f} s", f"{one.longest:.2f} s", f"{one.share:.0%}",
         one.stage.meaning]
        for one in figures(result.kind, best.good)
    ]  # fmt: skip
    click.echo()
    table(["STAGE", "MEDIAN", "90 %", "LONGEST", "SHARE", ""], rows)
    click.echo(f"\n{result.cost_most}")
