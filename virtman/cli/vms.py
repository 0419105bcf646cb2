"""Commands about VMs."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from virtman.cli import options
from virtman.cli.output import Answer, Failure, fields
from virtman.errors import CoordinatorDown, NotFound, UnknownImage, UnknownVm
from virtman.sizes import check_size
from volt.printing import table
from volt.text import natural_order, size_text

if TYPE_CHECKING:
    from virtman.client import AgentClient
    from virtman.models import Vm


@options.command()
@click.argument("vm")
@options.image
@options.size
@click.option("--replace", is_flag=True, help="Destroy what there is of this name first.")
def create(client: AgentClient, vm: str, image: str, *, size: int | None, replace: bool) -> Answer:
    """Create a disk for VM from IMAGE and print its path. Asked again, it prints the same path.

    \b
    Example: qemu-system-x86_64 -m 1G -nographic -drive file=$(virtman create web-1 debian-12),if=virtio
    """
    check_size(size)
    if replace:
        here = {stack.name for stack in client.status().images}
        if image not in here and image not in {listed.name for listed in client.images()}:
            raise UnknownImage(f"no image {image} is published")  # which is no reason to destroy anything
        with suppress(UnknownVm):
            client.destroy(vm)
    answer = client.create(vm, image, size)
    return Answer(answer, answer.disk.path)


@options.command()
@options.vm
@options.image
@options.size
@click.option("--memory", type=click.IntRange(min=32), default=1024, show_default=True, help="MiB.")
@click.option("--cpus", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--network", default="user", show_default=True, help="user, none, network:NAME or bridge:NAME of libvirt."
)
@click.option("--cloud-init", type=click.File(), help="User data for cloud-init.")
@click.option("--ssh-key", type=click.File(), multiple=True, help="A file with public keys to let in; may be repeated.")
def boot(
    client: AgentClient, /, vm: str, image: str, *, size: int | None, cloud_init: Any, ssh_key: tuple[Any, ...],
    **how: Any,
) -> Answer:  # fmt: skip
    """Start VM from IMAGE through libvirt, creating its disk if needed.

    Each VM gets a name, a MAC address and a NoCloud seed of its own.

    \b
    Example: virtman boot web-1 debian-12 --memory 2048 --cpus 2 --ssh-key ~/.ssh/id_ed25519.pub
    """
    keys = [line.strip() for file in ssh_key for line in _text(file).splitlines() if line.strip()]
    user_data = _text(cloud_init) if cloud_init else None
    check_size(size)
    answer = client.boot(vm, image, size, ssh_keys=keys, user_data=user_data, **how)
    return Answer(answer, f"{vm} is {answer.state} on {answer.disk.path}; see: virtman console {vm}")


def _text(file: Any) -> str:
    try:
        text: str = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"cannot read {file.name} as text: {error}") from error
    return text


@options.command("list")
def list_vms(client: AgentClient) -> Answer:
    """List the VMs of this host."""
    vms = sorted(client.vms(), key=lambda vm: natural_order(vm.name))
    rows = [[vm.name, vm.disk.image, size_text(vm.disk.size), vm.state] for vm in vms]
    return Answer(vms, partial(table, ["VM", "IMAGE", "SIZE", "STATE"], rows))


@options.command()
@click.argument("name", shell_complete=options.names_of_both)
@click.option("--image", is_flag=True, help="NAME is that of an image, also if a VM has it, too.")
def show(client: AgentClient, name: str, image: bool) -> Answer:
    """Show all that is known of the VM NAME of this host, or of the image NAME.

    What an image shares with the one that it was made of is counted in chunks of 64 KiB. A host knows that of images
    that it has published, or read with all lists of their chunks.

    \b
    Examples:
      virtman show web-1
      virtman show debian-12
    """
    from virtman.cli.images import shown

    if image:
        return shown(client.image(name))
    try:
        return _shown(client.vm(name))
    except UnknownVm as missing:
        try:
            return shown(client.image(name))
        except UnknownImage:
            raise NotFound(f"{missing}, and no image has this name") from None
        except CoordinatorDown as error:
            raise CoordinatorDown(f"{missing}; whether an image has this name cannot be told: {error}") from None


def _shown(answer: Vm) -> Answer:
    disk, machine = answer.disk, answer.machine
    rows: list[list[Any]] = [
        ["name", answer.name], ["state", answer.state], ["UUID", str(answer.uuid)], ["image", disk.image],
        ["disk", disk.path], ["disk's size", size_text(disk.size)], ["disk's phase", disk.phase],
    ]  # fmt: skip
    if disk.source is not None:
        rows.append(["clone of", disk.source])
    if answer.disks:
        rows.append(["further disks", ", ".join(answer.disks)])
    if machine is not None:
        rows += [
            ["memory", size_text(machine.memory << 20)], ["processors", str(machine.cpus)],
            ["network", machine.network], ["MAC address", machine.mac or "-"], ["run with", machine.accel],
            ["console's log", machine.console_log],
        ]  # fmt: skip
    if disk.blockdev is not None:
        rows.append(["for --blockdev", json.dumps(disk.blockdev)])
    return Answer(answer, partial(fields, rows))


@options.command()
@options.vm
def start(client: AgentClient, vm: str) -> Answer:
    """Start VM again, as it was booted before, with what "virsh edit" has changed. One that runs is left alone.

    A VM whose memory libvirt has saved (virsh managedsave) goes on with that memory.

    \b
    Example: virtman start web-1
    """
    answer = client.start(vm)
    return Answer(answer, f"{vm} is {answer.state}; see: virtman console {vm}")


@options.command()
@options.vm
@click.option(
    "--force",
    is_flag=True,
    help="Cut the power instead of asking the VM to shut down; memory that libvirt has saved goes, too.",
)
def stop(client: AgentClient, vm: str, force: bool) -> Answer:
    """Shut VM down; its disk stays."""
    client.stop(vm, force=force)
    return Answer({"stopped": vm})


@options.command()
@options.vm
@click.option("--log", is_flag=True, help="Print what the console has printed so far, and end.")
def console(client: AgentClient, vm: str, log: bool) -> Answer:
    """Connect to VM's serial console; leave with Ctrl-]."""
    where = client.console(vm)

    def show() -> None:
        try:
            if log:
                click.echo(Path(where.log).read_bytes(), nl=False)
            else:
                os.execvp("virsh", ["virsh", "--connect", where.libvirt, "console", where.domain])  # noqa: S606
        except FileNotFoundError as error:
            nothing = f"{vm} has printed nothing; was it booted?"
            raise Failure(nothing if log else "virsh is missing: package libvirt-clients") from error

    return Answer(where, show)


@options.command()
@options.vm
@click.argument("size", type=options.SizeType())
def resize(client: AgentClient, vm: str, size: int) -> Answer:
    """Grow the disk of VM to SIZE, also while it runs. New space reads as zeros; no disk is made smaller.

    A VM that "virtman boot" started sees it at once. A QEMU of your own is told by its monitor: block_resize NODE SIZE,
    for a disk that is a file instead of this command, which you then repeat.

    \b
    Example: virtman resize web-1 40G
    """
    check_size(size)
    answer = client.resize(vm, size)
    return Answer(answer, f"the disk of {vm} has {size_text(answer.disk.size)} now")


@options.command()
@options.vm
@click.argument("new")
def rename(client: AgentClient, vm: str, new: str) -> Answer:
    """Rename VM, which must be off, to NEW, and print the new path of its disk.

    It keeps its UUID, MAC address and NoCloud seed: to its guest and its network it is the same. Asked again, it prints
    the same path.

    \b
    Example: virtman stop web-1 && virtman rename web-1 shop && virtman start shop
    """
    answer = client.rename(vm, new)
    return Answer(answer, answer.disk.path)


@options.command()
@options.vm
@click.argument("disk", shell_complete=options.names_of_vms)
def attach_disk(client: AgentClient, vm: str, disk: str) -> Answer:
    """Attach the disk DISK of "virtman create" to VM, at once if it runs, and whenever it is started.

    Its guest finds it as a SCSI disk by its name, if that has at most 20 characters. The disk can still grow, and
    snapshots of it be taken. Asked again, it answers the same.

    \b
    Example: virtman create data debian-12 && virtman attach-disk web-1 data
             and in the guest: /dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_data
    """
    answer = client.attach_disk(vm, disk)
    return Answer(answer, f"{vm} has the disks: {', '.join(answer.disks)}")


@options.command()
@options.vm
@click.argument("disk", shell_complete=options.names_of_vms)
def detach_disk(client: AgentClient, vm: str, disk: str) -> Answer:
    """Detach the disk DISK from VM, at once if it runs: unmount it in the guest before. The disk keeps its content.

    \b
    Example: virtman detach-disk web-1 data
    """
    answer = client.detach_disk(vm, disk)
    return Answer(answer, f"{disk} is detached from {vm}")


@options.command()
@options.vm
def destroy(client: AgentClient, vm: str) -> Answer:
    """Destroy VM and its disk for good; a running VM is switched off."""
    client.destroy(vm)
    return Answer({"destroyed": vm})
