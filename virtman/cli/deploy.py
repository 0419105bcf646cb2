"""Commands for whole images on their way to many hosts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from virtman.cli import options
from virtman.cli.options import F
from virtman.cli.output import Answer, Failure, progress
from virtman.errors import VirtmanError, VoltRefused
from volt.printing import table
from volt.text import size_text

if TYPE_CHECKING:
    from virtman.client import AgentClient
    from volt.deploymodels import Deployment

DAY = 86400


TRAVEL = (
    click.option("--to", "hosts", metavar="HOST,…", help="Names of hosts."),
    click.option("--place", metavar="SITE/RACK", help="All hosts of a site or a rack that are alive."),
    click.option("--all", "everywhere", is_flag=True, help="All hosts that are alive."),
    click.option(
        "--method", default="auto", show_default=True, metavar="METHOD",
        help="How the image travels: lazy, tree, unicast, bittorrent, udpcast or uftp; auto tries the network and"
        " chooses.",
    ),
    click.option(
        "--encrypt/--no-encrypt", default=None, help="Only encrypted, or also not.  [default: as the method does]"
    ),
    click.option(
        "--limit", type=options.SizeType(least=1), help="The most that each host receives in a second, e.g. 100M."
    ),
    click.option(
        "--parallel", type=click.IntRange(1), default=1, show_default=True, help="With unicast: hosts at a time."
    ),
)  # fmt: skip
"""Where an image goes, and how."""


def travel(command: F) -> F:
    """Give a command the options ``TRAVEL``, of which ``request`` makes what Volt is asked for."""
    for option in reversed(TRAVEL):  # what is added last comes first
        command = option(command)
    return command


def keep(days: float) -> Callable[[F], F]:
    """The option that says for how long an image stays."""
    return click.option("--keep", type=click.FloatRange(0.001, 36500), default=days, show_default=True,
        metavar="DAYS", help="How long the image stays on the hosts.",
    )  # fmt: skip


def request(
    image: str, keep: float, *, hosts: str | None, place: str | None, everywhere: bool, **how: Any
) -> dict[str, Any]:
    """What Volt is asked for (``volt.deploymodels.DeploymentRequest``). Raises UsageError."""
    if [hosts is not None, place is not None, everywhere].count(True) != 1:
        raise click.UsageError("say where: --to HOST,…, --place SITE/RACK or --all")
    if math.isnan(keep):
        raise click.UsageError("--keep wants a number of days")
    named = hosts.split(",") if hosts is not None else None
    where = {"hosts": named, "place": place, "everywhere": everywhere}
    return {"image": image, "keep_s": int(keep * DAY), **where, **how}


@options.command()
@options.image
@travel
@keep(30)
@click.option("--explain", is_flag=True, help="Say why auto chose the method, and what each would have taken.")
@click.option("--detach", is_flag=True, help='Return when it is planned; see "virtman deployments".')
def deploy(client: AgentClient, image: str, keep: float, *, explain: bool, detach: bool, **how: Any) -> Answer:
    """Bring all of IMAGE to many hosts, which then need no other host to read it.

    Hosts that have a part of it get only the rest. bittorrent and udpcast send unencrypted, and so does uftp without
    --encrypt: auto takes them only with --no-encrypt. The image stays for --keep days.

    Without --detach this command waits until no host is under way any more; if it is interrupted, the deployment goes
    on. The exit code is 1 unless all hosts have all of it.

    \b
    Examples:
      virtman deploy debian-12 --all
      virtman deploy debian-12 --place paris --method tree --keep 7
      virtman deploy debian-12 --to node-1,node-2 --detach
      virtman deploy debian-12 --all --no-encrypt --explain
    """
    made = client.deploy(request(image, keep, **how))
    if detach:
        return Answer(made, f"deployment {made.id}: {image} to {len(made.hosts)} hosts by {made.method}")
    try:
        with progress() as show:
            ended = client.follow_deployment(made.id, show, say=partial(click.echo, err=True))
    except VoltRefused:
        raise
    except VirtmanError as error:
        raise Failure(f"{error}; the deployment goes on: virtman deployments {made.id}") from error
    return _shown(ended, code=0 if all(host.state == "whole" for host in ended.hosts) else 1, explain=explain)


@options.command()
@click.argument("number", required=False, type=click.IntRange(1))
@click.option("--cancel", is_flag=True, help="End it; hosts that have all of the image keep it.")
def deployments(client: AgentClient, number: int | None, cancel: bool) -> Answer:
    """List deployments, or show the one with NUMBER.

    \b
    Examples:
      virtman deployments
      virtman deployments 17 --json
      virtman deployments 17 --cancel
    """
    if number is None:
        if cancel:
            raise click.UsageError("--cancel goes with NUMBER")
        return _listed(client.deployments())
    if cancel:
        client.cancel_deployment(number)
    return _shown(client.deployment(number))


@options.command()
@click.argument("image", required=False, shell_complete=options.names_of_images)
def hosts(client: AgentClient, image: str | None) -> Answer:
    """List all hosts, where they are, and the images of which they have all.

    With IMAGE only the hosts that have all of it.

    \b
    Examples:
      virtman hosts
      virtman hosts debian-12 --json
    """
    found = [host for host in client.hosts() if image is None or image in host.whole]
    rows = [[host.name, host.place or "-", host.state, ", ".join(host.whole) or "-"] for host in found]
    return Answer(found, partial(table, ("HOST", "PLACE", "STATE", "WHOLE"), rows))


def _listed(found: list[Deployment]) -> Answer:
    rows = [[one.id, one.image, one.method, _state(one), f"{one.seconds:.1f} s"] for one in found]
    return Answer(found, partial(table, ("NUMBER", "IMAGE", "METHOD", "STATE", "TIME"), rows))


def _state(one: Deployment) -> str:
    return "cancelled" if one.cancelled else "ended" if one.ended else "under way"


def _shown(one: Deployment, *, code: int = 0, explain: bool = True) -> Answer:
    rows = [
        [
            host.host, host.place or "-", host.state, f"{100 * host.done // host.total}%" if host.total else "-",
            size_text(host.sent), "-" if host.seconds is None else f"{host.seconds:.1f} s", host.error,
        ]
        for host in one.hosts
    ]  # fmt: skip
    columns = ("HOST", "PLACE", "STATE", "THERE", "SENT", "TIME", "")

    def text() -> None:
        click.echo(f"deployment {one.id}: {one.image} by {one.method}, {_state(one)} after {one.seconds:.1f} s")
        table(columns, rows)
        for leg in one.legs:
            click.echo(f"{leg.source} has sent {size_text(leg.sent)} by {one.method} to {leg.receivers} hosts")
        if explain and one.why:
            click.echo(f"{one.method} was chosen: {one.why}")
            expected = sorted(one.predicted.items(), key=itemgetter(1))
            table(("METHOD", "EXPECTED"), [[method, f"{seconds:.1f} s"] for method, seconds in expected])

    return Answer(one, text, code=code)
