"""Commands about images."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from virtman.cli import options
from virtman.cli.output import Answer, fields, progress
from volt.printing import draw, table
from volt.text import size_text

if TYPE_CHECKING:
    from virtman.client import AgentClient
    from virtman.models import Image, ImageDetails, ImageHere


class _Begun(Exception):
    """The agent has looked at what it is to publish, and copies it."""


@options.command()
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--from-vm", "vm", metavar="VM", help="Publish what the disk of VM, which may run, holds now.")
@click.option(
    "--parent",
    metavar="IMAGE",
    shell_complete=options.names_of_images,
    help="The image that FILE was made of. FILE may be a qcow2 overlay of what IMAGE holds.",
)
@click.option("--in-place", is_flag=True, help="Serve FILE, raw or a block device, where it is; it is not copied.")
@click.option("--trust", metavar="DIGEST", help="With --in-place: the digest that FILE has, as you know.")
@click.option("--digest", is_flag=True, help="With --in-place: compute FILE's digest in the background.")
@click.option("--detach", is_flag=True, help="Return when the copy has begun; the agent goes on alone.")
def publish(
    client: AgentClient, name: str, file: Path | None, vm: str | None, parent: str | None, in_place: bool,
    trust: str | None, digest: bool, detach: bool
) -> Answer:  # fmt: skip
    """Publish FILE (raw or qcow2), or the disk of a VM, as image NAME; this host becomes its origin.

    Nothing is published if this command is interrupted, except with --detach: then "virtman images" lists the image
    when it is published, and the agent's log says why it could not be.

    What is served in place must stay as it is: once FILE has changed, or is another device, it is served no more.

    Chunks that are in the parent, too, are neither fetched nor kept twice by a host. An overlay takes what it does not
    have from the parent, whatever its header names.

    \b
    Examples:
      virtman publish debian-12 ./debian-12.qcow2
      virtman publish debian-12-1 ./update.qcow2 --parent debian-12
      virtman publish prepared --from-vm web-1
      virtman publish debian-12 /dev/mapper/debian-12 --in-place
    """
    if (trust is not None or digest) and not in_place:
        raise click.UsageError("--trust and --digest go with --in-place")
    if in_place and (file is None or vm is not None or detach):
        raise click.UsageError("--in-place goes with FILE, and without --from-vm and --detach")
    if parent is not None and (file is None or in_place):
        raise click.UsageError(
            "--parent goes with FILE, and without --in-place; the parent of --from-vm is the VM's image"
        )

    def begun(*_progress: object) -> None:
        raise _Begun

    try:
        with progress() as show:
            on_progress = begun if detach else show
            if file is not None and in_place:
                image = client.publish_in_place(name, file.absolute(), trust, digest=digest)
            elif file is not None and vm is None:
                image = client.publish(name, file.absolute(), on_progress, detach=detach, parent=parent)
            elif vm is not None and file is None:
                image = client.publish_vm(name, vm, on_progress, detach=detach)
            else:
                raise click.UsageError("what is to be published: either FILE or --from-vm VM")
    except _Begun:
        return Answer({"publishing": name}, f"{name} is being published")
    return Answer(image, f"{image.name}: {size_text(image.size)}, {image.digest}")


@options.command()
@options.image
@click.option("--when-unused", is_flag=True, help="Remove it, with its content, when no host needs it any more.")
def unpublish(client: AgentClient, image: str, when_unused: bool) -> Answer:
    """Take back IMAGE, which this host published.

    Hosts that read it keep it: then Volt refuses, and names them. The content stays on this host until virtman gc.
    With --when-unused no further host gets it, except for a disk that comes from another host. A host that has it
    detaches it after its last VM of it, and deletes its copy. Until then "virtman publish" revokes this.

    \b
    Examples:
      virtman unpublish debian-11 && virtman gc
      virtman unpublish debian-11 --when-unused
    """
    answer = client.unpublish(image, when_unused=when_unused)
    said = ""
    if answer.withdrawn:
        said = f"{image} is withdrawn; it is removed when no host needs it any more"
    elif answer.serving:
        said = f"{image} is not published by this host any more; it is served here until its VMs are destroyed"
    return Answer(answer, said)


@options.command()
def images(client: AgentClient) -> Answer:
    """List the published images.

    Hosts cannot check each chunk that they read of an unverified image: it is in place, or of an earlier version.
    """
    answer = client.images()
    rows = [
        [
            image.name, size_text(image.size), ", ".join(image.origins), image.nodes,
            image.here and _here(image.here),
            size_text(image.here.held_bytes if image.here else 0), _state(image),
        ]
        for image in answer
    ]  # fmt: skip
    columns = ("IMAGE", "SIZE", "ORIGIN", "HOSTS", "HERE", "CACHED HERE", "STATE")
    return Answer(answer, partial(table, columns, rows))


@options.command()
@options.image
@click.option("--until-ready", is_flag=True, help="Return when all of IMAGE is here.")
@click.option("--cancel", is_flag=True, help="Keep what VMs read, as of any other image.")
def hydrate(client: AgentClient, image: str, until_ready: bool, cancel: bool) -> Answer:
    """Keep all of IMAGE on this host, which then needs no other host to read it.

    IMAGE is read behind what VMs read, also when this command has ended, and stays until --cancel. It counts towards
    the limit of the cache. Other hosts prefer to read from such a host.

    \b
    Example: virtman hydrate debian-12 --until-ready
    """
    if cancel:
        if until_ready:
            raise click.UsageError("either --until-ready or --cancel")
        client.end_hydration(image)
        return Answer({"hydrated": False}, f"{image} is not kept as a whole any more")
    with progress() as show:
        answer = client.hydrate(image, show, until_ready=until_ready)
    said = "is here" if answer.whole else "is being read, behind what VMs read; see: virtman status"
    return Answer(answer, f"{image}: all of it {said}")


def shown(image: ImageDetails) -> Answer:
    """What "virtman show" prints of an image."""
    rows: list[list[object]] = [
        ["name", image.name], ["state", "withdrawn" if image.withdrawn else "published"],
        ["size", size_text(image.size)], ["digest", image.digest],
        ["verified", "yes" if image.verified else "no, hosts cannot check each chunk that they read"],
        ["parent", image.parent or "-"], ["origins", ", ".join(image.origins)],
        ["hosts", ", ".join(image.hosts) or "-"], ["here", _here(image.here) if image.here else "-"],
    ]  # fmt: skip
    if image.verified:
        rows.append(["data", _known(image.data_bytes)])
    if image.verified and image.parent:
        rows += [["own data", _known(image.own_bytes)], ["shared with the parent", _known(image.shared_bytes)]]
    return Answer(image, partial(fields, rows))


def _known(amount: int | None) -> str:
    return "unknown here" if amount is None else size_text(amount)


def _state(image: Image) -> str:
    from drivers.digests import proves_chunks

    state = "withdrawn" if image.withdrawn else "published"
    return state if proves_chunks(image.digest) else f"{state}, unverified"


def _here(here: ImageHere) -> str:
    place = here.in_place
    if place is None:
        return f"{here.role} ({here.phase})"
    return f"{here.role} in place ({here.phase if place.trouble is None else 'NOT served'})"


@options.command()
@options.image
def tree(client: AgentClient, image: str) -> Answer:
    """Draw the tree of hosts that share IMAGE.

    Hosts cannot check each chunk that they read of an unverified image.
    """
    answer = client.tree(image)

    def show() -> None:
        from drivers.digests import proves_chunks
        from volt.treeview import render

        draw(render(answer, "" if proves_chunks(answer.digest) else ", unverified"))

    return Answer(answer, show)
