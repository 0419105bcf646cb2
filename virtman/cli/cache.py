"""Commands about the volumes of the cache, and about devices of others that are read through it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from virtman.cli import options
from virtman.cli.host import print_devices
from virtman.cli.output import Answer
from volt.groups import Group
from volt.printing import table
from volt.text import size_text

if TYPE_CHECKING:
    from virtman.client import AgentClient


@click.group(cls=Group)
def cache() -> None:
    """Say which disks and files this host keeps in what it has read, and have devices read through them.

    \b
    Example: virtman cache list
    """


@options.command("list", group=cache)
def list_volumes(client: AgentClient) -> Answer:
    """List the volumes of the cache, the images that use them now, and the devices that are read through them.

    With --json only the volumes; see devices.

    \b
    Example: virtman cache list
    """
    volumes, devices = client.volumes(), client.cached_devices()

    def show() -> None:
        rows = [[v.path, size_text(v.size), v.state, ", ".join(v.images) or "-"] for v in volumes]
        table(["PATH", "SIZE", "STATE", "IMAGES"], rows)
        if devices:
            print_devices(devices)

    return Answer(volumes, show)


@options.command("devices", group=cache)
def list_devices(client: AgentClient) -> Answer:
    """List the devices of others that are read through the cache.

    \b
    Example: virtman cache devices
    """
    devices = client.cached_devices()
    return Answer(devices, partial(print_devices, devices))


@options.command("add", group=cache)
@click.argument("path", type=click.Path(path_type=Path))
def add_volume(client: AgentClient, path: Path) -> Answer:
    """Add PATH to the cache: an empty disk or partition, or a file that is made.

    A disk that holds anything, or is in use, is refused.

    \b
    Examples:
      virtman cache add /dev/disk/by-id/nvme-FAST_4711
      virtman cache add /srv/virtman-cache
    """
    volume = client.add_volume(path.absolute())
    trouble = f": {volume.trouble}" if volume.trouble else ""
    return Answer(volume, f"{volume.path}: {size_text(volume.size)}, {volume.state}{trouble}")


@options.command("remove", group=cache)
@click.argument("path", type=click.Path(path_type=Path))
def remove_volume(client: AgentClient, path: Path) -> Answer:
    """Take PATH from the cache: a file is deleted, a disk is free again. Images that are read go on.

    \b
    Example: virtman cache remove /dev/disk/by-id/nvme-FAST_4711
    """
    client.remove_volume(path.absolute())
    return Answer({"removed": str(path.absolute())})


@options.command("attach", group=cache)
@click.argument("device", type=click.Path(path_type=Path))
def attach_device(client: AgentClient, device: Path) -> Answer:
    """Read DEVICE through the cache, and print the path for a VM to use in its place.

    Writes go to the device before they are acknowledged; nothing else is ever written to it. A device that has grown
    gets its new size when it is attached again.

    \b
    Example: virtman cache attach /dev/disk/by-path/ip-192.0.2.7:3260-iscsi-iqn.2026-01.com.example:volumes-lun-1
    """
    attached = client.attach_cached(device.absolute())
    return Answer(attached, attached.path)


@options.command("detach", group=cache)
@click.argument("device", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Also while programs have it open; they get errors.")
def detach_device(client: AgentClient, device: Path, force: bool) -> Answer:
    """Detach DEVICE, called by its own path or by the one that was handed out. Nothing of the cache is left on it.

    \b
    Example: virtman cache detach /dev/mapper/virtman-volume-3b1f0c9a52d4e687
    """
    client.detach_cached(device.absolute(), force)
    return Answer({"detached": str(device.absolute())})
