"""Commands about VMs."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from virtman.cli import options
from virtman.cli.output import Failure, emit, fields, one_line_errors, table
from virtman.errors import BadSize, UnknownVm
from volt.text import exact_size, natural_order, size_text

S = TypeVar("S", int, int | None)

LARGEST = options.SUFFIXES["T"] << 7
"""Bytes: the most that the agent lets a disk have."""


@click.command()
@click.argument("vm")
@options.image
@options.size
@click.option("--replace", is_flag=True, help="Destroy what there is of this name first.")
@options.as_json
@click.pass_context
def create(context: click.Context, vm: str, image: str, *, size: int | None, replace: bool, as_json: bool) -> None:
    """Create a disk for VM from IMAGE and print its path. Asked again, it prints the same path.

    \b
    Example: qemu-system-x86_64 -m 1G -nographic -drive file=$(virtman create web-1 debian-12),if=virtio
    """
    possible = _possible(size)
    with options.agent(context) as client:
        if replace:
            with suppress(UnknownVm):
                client.destroy(vm)
        answer = client.create(vm, image, possible)
    emit(answer) if as_json else click.echo(answer.disk.path)


def _possible(size: S) -> S:
    with one_line_errors():
        if size is not None and (size % 512 or size <= 0 or size > LARGEST):
            raise BadSize(
                f"a disk of {exact_size(size)} is not possible: the size is a positive multiple of 512, and at most"
                f" {LARGEST >> 40}T"
            )
    return size


@click.command()
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
@options.as_json
@click.pass_context
def boot(
    context: click.Context, /, vm: str, image: str, *, size: int | None, cloud_init: Any, ssh_key: tuple[Any, ...],
    as_json: bool, **how: Any,
) -> None:  # fmt: skip
    """Start VM from IMAGE through libvirt, creating its disk if needed.

    Each VM gets a name, a MAC address and a NoCloud seed of its own.

    \b
    Example: virtman boot web-1 debian-12 --memory 2048 --cpus 2 --ssh-key ~/.ssh/id_ed25519.pub
    """
    keys = [line.strip() for file in ssh_key for line in _text(file).splitlines() if line.strip()]
    user_data = _text(cloud_init) if cloud_init else None
    with options.agent(context) as client:
        answer = client.boot(vm, image, _possible(size), ssh_keys=keys, user_data=user_data, **how)
    emit(answer) if as_json else click.echo(f"{vm} is {answer.state} on {answer.disk.path}; see: virtman console {vm}")


def _text(file: Any) -> str:
    try:
        text: str = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"cannot read {file.name} as text: {error}") from error
    return text


@click.command(name="list")
@options.as_json
@click.pass_context
def list_vms(context: click.Context, as_json: bool) -> None:
    """List the VMs of this host."""
    with options.agent(context) as client:
        vms = sorted(client.vms(), key=lambda vm: natural_order(vm.name))
    if as_json:
        emit(vms)
    else:
        table(
            ["VM", "IMAGE", "SIZE", "STATE"],
            [[vm.name, vm.disk.image, size_text(vm.disk.size), vm.state] for vm in vms],
        )


@click.command()
@options.vm
@options.as_json
@click.pass_context
def show(context: click.Context, vm: str, as_json: bool) -> None:
    """Show all that is known of VM.

    \b
    Example: virtman show web-1
    """
    with options.agent(context) as client:
        answer = client.vm(vm)
    if as_json:
        emit(answer)
        return
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
    fields(rows)


@click.command()
@options.vm
@options.as_json
@click.pass_context
def start(context: click.Context, vm: str, as_json: bool) -> None:
    """Start VM again, as it was booted before, with what "virsh edit" has changed. One that runs is left alone.

    A VM whose memory libvirt has saved (virsh managedsave) goes on with that memory.

    \b
    Example: virtman start web-1
    """
    with options.agent(context) as client:
        answer = client.start(vm)
    emit(answer) if as_json else click.echo(f"{vm} is {answer.state}; see: virtman console {vm}")


@click.command()
@options.vm
@click.option(
    "--force",
    is_flag=True,
    help="Cut the power instead of asking the VM to shut down; memory that libvirt has saved goes, too.",
)
@options.as_json
@click.pass_context
def stop(context: click.Context, vm: str, force: bool, as_json: bool) -> None:
    """Shut VM down; its disk stays."""
    with options.agent(context) as client:
        client.stop(vm, force=force)
    if as_json:
        emit({"stopped": vm})


@click.command()
@options.vm
@click.option("--log", is_flag=True, help="Print what the console has printed so far, and end.")
@options.as_json
@click.pass_context
def console(context: click.Context, vm: str, log: bool, as_json: bool) -> None:
    """Connect to VM's serial console; leave with Ctrl-]."""
    import os

    with options.agent(context) as client:
        where = client.console(vm)
    if as_json:
        emit(where)
        return
    try:
        if log:
            click.echo(Path(where.log).read_bytes(), nl=False)
        else:
            os.execvp("virsh", ["virsh", "--connect", where.libvirt, "console", where.domain])  # noqa: S606
    except FileNotFoundError as error:
        missing = f"{vm} has printed nothing; was it booted?" if log else "virsh is missing: package libvirt-clients"
        raise Failure(missing) from error


@click.command()
@options.vm
@click.argument("size", type=options.SizeType())
@options.as_json
@click.pass_context
def resize(context: click.Context, vm: str, size: int, as_json: bool) -> None:
    """Let the disk of VM grow to SIZE, also while it runs. What is new are zeros; nothing is made smaller.

    A VM that "virtman boot" started sees it at once. A QEMU of your own is told by its monitor: block_resize NODE SIZE,
    for a disk that is a file instead of this command, which you then repeat.

    \b
    Example: virtman resize web-1 40G
    """
    with options.agent(context) as client:
        answer = client.resize(vm, _possible(size))
    emit(answer) if as_json else click.echo(f"the disk of {vm} has {size_text(answer.disk.size)} now")


@click.command()
@options.vm
@click.argument("new")
@options.as_json
@click.pass_context
def rename(context: click.Context, vm: str, new: str, as_json: bool) -> None:
    """Call VM, which must be off, NEW from now on, and print its disk's path, which is another one then.

    It keeps its UUID, MAC address and NoCloud seed: to its guest and its network it is the same. Asked again, it prints
    the same path.

    \b
    Example: virtman stop web-1 && virtman rename web-1 shop && virtman start shop
    """
    with options.agent(context) as client:
        answer = client.rename(vm, new)
    emit(answer) if as_json else click.echo(answer.disk.path)


@click.command()
@options.vm
@click.argument("disk", shell_complete=options.names_of_vms)
@options.as_json
@click.pass_context
def attach_disk(context: click.Context, vm: str, disk: str, as_json: bool) -> None:
    """Let VM use the disk DISK of "virtman create" besides its own, at once if it runs, and whenever it is started.

    Its guest finds it as a SCSI disk by its name, if that has at most 20 characters. The disk can still grow, and
    snapshots of it be taken. Asked again, it answers the same.

    \b
    Example: virtman create data debian-12 && virtman attach-disk web-1 data
             and in the guest: /dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_data
    """
    with options.agent(context) as client:
        answer = client.attach_disk(vm, disk)
    emit(answer) if as_json else click.echo(f"{vm} has the disks: {', '.join(answer.disks)}")


@click.command()
@options.vm
@click.argument("disk", shell_complete=options.names_of_vms)
@options.as_json
@click.pass_context
def detach_disk(context: click.Context, vm: str, disk: str, as_json: bool) -> None:
    """Take the disk DISK away from VM, at once if it runs: unmount it in the guest before. It keeps what it holds.

    \b
    Example: virtman detach-disk web-1 data
    """
    with options.agent(context) as client:
        answer = client.detach_disk(vm, disk)
    emit(answer) if as_json else click.echo(f"{disk} is detached from {vm}")


@click.command()
@options.vm
@options.as_json
@click.pass_context
def destroy(context: click.Context, vm: str, as_json: bool) -> None:
    """Destroy VM and its disk for good; a running VM is switched off."""
    with options.agent(context) as client:
        client.destroy(vm)
    if as_json:
        emit({"destroyed": vm})


COMMANDS = (
    create,
    boot,
    list_vms,
    show,
    start,
    stop,
    console,
    resize,
    rename,
    attach_disk,
    detach_disk,
    destroy,
)
