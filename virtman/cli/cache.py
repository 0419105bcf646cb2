"""Commands about the volumes of the cache, and about devices of others that are read through it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from virtman.cli import options
from virtman.cli.host import DEVICE_COLUMNS, device_rows
from virtman.cli.output import emit, table
from volt.groups import Group
from volt.text import size_text

if TYPE_CHECKING:
    from virtman.models import CachedDevice


@click.group(cls=Group)
def cache() -> None:
    """Say which disks and files this host keeps in what it has read, and have devices read through them.

    \b
    Example: virtman cache list
    """


@cache.command(name="list")
@options.as_json
@click.pass_context
def list_volumes(context: click.Context, as_json: bool) -> None:
    """List the volumes of the cache, the images that use them now, and the devices that are read through them.

    With --json only the volumes; see devices.

    \b
    Example: virtman cache list
    """
    with options.agent(context) as client:
        volumes = client.volumes()
        devices = [] if as_json else client.cached_devices()
    if as_json:
        emit(volumes)
        return
    rows = [[v.path, size_text(v.size), v.state, ", ".join(v.images) or "-"] for v in volumes]
    table(["PATH", "SIZE", "STATE", "IMAGES"], rows)
    if devices:
        _print_devices(devices)


@cache.command(name="devices")
@options.as_json
@click.pass_context
def list_devices(context: click.Context, as_json: bool) -> None:
    """List the devices of others that are read through the cache.

    \b
    Example: virtman cache devices
    """
    with options.agent(context) as client:
        devices = client.cached_devices()
    emit(devices) if as_json else _print_devices(devices)


def _print_devices(devices: list[CachedDevice]) -> None:
    table(DEVICE_COLUMNS, device_rows(devices))


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
    if as_json:
        emit(volume)
    else:
        trouble = f": {volume.trouble}" if volume.trouble else ""
        click.echo(f"{volume.path}: {size_text(volume.size)}, {volume.state}{trouble}")


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


@cache.command(name="attach")
@click.argument("device", type=click.Path(path_type=Path))
@options.as_json
@click.pass_context
def attach_device(context: click.Context, device: Path, as_json: bool) -> None:
    """Read DEVICE through the cache, and print the path for a VM to use in its place.

    Writes go to the device before they are acknowledged; nothing else is ever written to it. A device that has grown
    gets its new size when it is attached again.

    \b
    Example: virtman cache attach /dev/disk/by-path/ip-192.0.2.7:3260-iscsi-iqn.2026-01.com.example:volumes-lun-1
    """
    with options.agent(context) as client:
        attached = client.attach_cached(device.absolute())
    emit(attached) if as_json else click.echo(attached.path)


@cache.command(name="detach")
@click.argument("device", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Even while somebody has it open, who gets errors from then on.")
@options.as_json
@click.pass_context
def detach_device(context: click.Context, device: Path, force: bool, as_json: bool) -> None:
    """Let DEVICE go, called by its own path or by the one that was handed out. Nothing of the cache is left on it.

    \b
    Example: virtman cache detach /dev/mapper/virtman-volume-3b1f0c9a52d4e687
    """
    with options.agent(context) as client:
        client.detach_cached(device.absolute(), force)
    if as_json:
        emit({"detached": str(device.absolute())})


COMMANDS = (cache,)
