"""Commands about the volumes of the cache."""

from __future__ import annotations

from pathlib import Path

import click

from virtman.cli import options
from virtman.cli.output import emit, size_text, table


@click.group()
def cache() -> None:
    """Say which disks and files this host keeps in what it has read.

    \b
    Example: virtman cache list
    """


@cache.command(name="list")
@options.as_json
@click.pass_context
def list_volumes(context: click.Context, as_json: bool) -> None:
    """List the volumes of the cache and the images that use them now.

    \b
    Example: virtman cache list
    """
    with options.agent(context) as client:
        volumes = client.volumes()
    if as_json:
        emit(volumes)
        return
    rows = [[v.path, size_text(v.size), v.state, ", ".join(v.images) or "-"] for v in volumes]
    table(["PATH", "SIZE", "STATE", "IMAGES"], rows)


@cache.command(name="add")
@click.argument("path", type=click.Path(path_type=Path))
@options.as_json
@click.pass_context
def add_volume(context: click.Context, path: Path, as_json: bool) -> None:
    """Let the cache use PATH: an empty disk, or a file that is made.

    A partition will do too. What holds anything, or is in use, is refused.

    \b
    Examples:
      virtman cache add /dev/disk/by-id/nvme-FAST_4711
      virtman cache add /srv/virtman-cache
    """
    with options.agent(context) as client:
        volume = client.add_volume(path.absolute())
    emit(volume) if as_json else click.echo(f"{volume.path}: {size_text(volume.size)}, {volume.state}")


@cache.command(name="remove")
@click.argument("path", type=click.Path(path_type=Path))
@options.as_json
@click.pass_context
def remove_volume(context: click.Context, path: Path, as_json: bool) -> None:
    """Take PATH from the cache: a file is deleted, a disk is free again. Images that are read go on.

    \b
    Example: virtman cache remove /dev/disk/by-id/nvme-FAST_4711
    """
    with options.agent(context) as client:
        client.remove_volume(path.absolute())
    if as_json:
        emit({"removed": str(path.absolute())})


COMMANDS = (cache,)
