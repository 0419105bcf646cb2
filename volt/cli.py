"""The command `volt`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from volt.errors import VoltError
from volt.groups import Group
from volt.printing import draw, table
from volt.text import size_text

if TYPE_CHECKING:
    from pydantic import BaseModel

    from volt.client import VoltClient

option = partial(click.option, show_default=True)
FILE = click.Path(dir_okay=False, path_type=Path)
TOKEN_FILE = click.option("--token-file", envvar="VOLT_TOKEN_FILE", type=FILE, help="File with the bearer token.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def client_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that calls Volt: the arguments ``url`` and ``token_file``."""
    url = option("--url", envvar="VOLT_URL", default="http://127.0.0.1:8700", help="Where Volt is.")
    return url(TOKEN_FILE(command))


class Cli(Group):
    """Our errors are one line and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except VoltError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Cli)
@click.version_option(package_name="virtman")
def main() -> None:
    """Volt coordinates hosts that fetch images through trees of each other."""


@main.command()
@option("--listen", envvar="VOLT_LISTEN", default="127.0.0.1:8700", help="HOST:PORT; port 0 picks one.")
@option("--state", envvar="VOLT_STATE", default="/var/lib/volt", type=Path, help="Folder of the default database.")
@click.option("--database", envvar="VOLT_DATABASE", help="SQLAlchemy URL.  [default: SQLite in the state folder]")
@option(
    "--fanout",
    envvar="VOLT_FANOUT",
    default=2,
    type=click.IntRange(1, 1024),
    help="Primary children of a host, for images published from now on.",
)
@TOKEN_FILE
@option(
    "--heartbeat",
    envvar="VOLT_HEARTBEAT",
    default=2.0,
    type=click.FloatRange(0, min_open=True),
    help="Seconds between a host's heartbeats; more when there are many hosts.",
)
@option(
    "--lease",
    envvar="VOLT_LEASE",
    default=10.0,
    type=click.FloatRange(0, min_open=True),
    help="Seconds without heartbeat until a host is evicted; five intervals at least.",
)
def serve(
    listen: str, state: Path, database: str | None, fanout: int, token_file: Path | None, heartbeat: float, lease: float
) -> None:
    """Serve Volt's API until SIGTERM.

    On an address that is not loopback a token file is needed.

    \b
    Examples:
      volt serve
      volt serve --listen 10.0.0.1:8700 --token-file /etc/volt/token
      volt serve --database postgresql+psycopg://volt@db/volt
    """
    import logging

    from volt import server
    from volt.leases import Policy

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    policy = Policy(fanout, heartbeat, lease)
    server.serve(listen, state, database, token_file, policy, lambda url: click.echo(f"listening on {url}"))


@main.command()
@click.argument("image")
@client_options
@AS_JSON
def tree(image: str, url: str, token_file: Path | None, as_json: bool) -> None:
    """Draw an image's tree: states, depth, slots, bytes fetched.

    \b
    Example:
      volt tree debian-12
    """
    with _volt(url, token_file) as volt:
        shown = volt.tree(image)
    if as_json:
        click.echo(shown.model_dump_json(indent=2))
        return
    from volt.treeview import render

    draw(render(shown))


@main.group(invoke_without_command=True)
@client_options
@AS_JSON
@click.pass_context
def hosts(ctx: click.Context, url: str, token_file: Path | None, as_json: bool) -> None:
    """List the hosts, or remove one.

    \b
    Examples:
      volt hosts --json
      volt hosts remove node-17
    """
    ctx.obj = (url, token_file)
    if ctx.invoked_subcommand:
        return
    with _volt(url, token_file) as volt:
        found = volt.hosts()
    rows = [(h.name, h.state, h.place or "-", f"{h.last_seen:%Y-%m-%d %H:%M:%S}Z", h.address) for h in found]
    _print(found, as_json, ("host", "state", "place", "last seen", "address"), rows)


@hosts.command(name="remove")
@click.argument("name")
@click.pass_obj
def remove_host(obj: tuple[str, Path | None], name: str) -> None:
    """Take a host out of all trees and forget it."""
    with _volt(*obj) as volt:
        volt.remove_host(name)


@main.group(invoke_without_command=True)
@client_options
@AS_JSON
@click.pass_context
def images(ctx: click.Context, url: str, token_file: Path | None, as_json: bool) -> None:
    """List the images, or remove one.

    \b
    Examples:
      volt images --url http://10.0.0.1:8700 --token-file /etc/volt/token
      volt images remove debian-11
    """
    ctx.obj = (url, token_file)
    if ctx.invoked_subcommand:
        return
    with _volt(url, token_file) as volt:
        found = volt.images()
    rows = [
        (
            image.name,
            size_text(image.size),
            str(image.nodes),
            ", ".join(image.origins),
            "withdrawn" if image.withdrawn else "published",
            image.digest,
        )
        for image in found
    ]
    _print(found, as_json, ("image", "size", "hosts", "origins", "state", "digest"), rows)


@images.command(name="remove")
@click.argument("name")
@click.option("--when-unused", is_flag=True, help="Let no further host have it, and let it go when none needs it.")
@click.pass_obj
def remove_image(obj: tuple[str, Path | None], name: str, when_unused: bool) -> None:
    """Withdraw an image that no host but its origins has; 'virtman gc' on the origins then deletes its content.

    With --when-unused it may be in use, and all hosts delete it by themselves.
    """
    with _volt(*obj) as volt:
        volt.remove_image(name, when_unused=when_unused)


@contextmanager
def _volt(url: str, token_file: Path | None) -> Iterator[VoltClient]:
    from volt.client import VoltClient

    with VoltClient(url, token_file) as volt:
        yield volt


def _print(found: Sequence[BaseModel], as_json: bool, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if as_json:
        click.echo(json.dumps([model.model_dump(mode="json") for model in found], indent=2))
        return
    table(header, rows)


if __name__ == "__main__":
    main()
