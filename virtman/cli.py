"""The command line of VirtMan.

What is slow to import is imported where it is used, so that ``virtman create`` is quick.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from drivers.base import PATH_POLICIES, STATE
from virtman.errors import BadSize, VirtmanError

if TYPE_CHECKING:
    from virtman.client import AgentClient

F = TypeVar("F", bound=Callable[..., Any])

WIDE = 250
"""Columns of a table that no terminal cuts off."""

VOLUME_TROUBLE = {"failed": "has failed", "missing": "is missing"}
"""What is said of a volume in such a state."""

SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Failure(click.ClickException):
    """One line on stderr and exit code 1."""

    def show(self, file: Any = None) -> None:
        """Print the line."""
        click.echo(f"virtman: {self.format_message()}", file=file, err=True)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors of ours as one line and exit code 1."""
    try:
        yield
    except VirtmanError as error:
        raise Failure(" ".join(str(error).split())) from error


@contextmanager
def agent(context: click.Context) -> Iterator[AgentClient]:
    """The agent to talk to."""
    from virtman.client import AgentClient

    with one_line_errors(), AgentClient(context.obj) as client:
        yield client


class SizeType(click.ParamType[int]):
    """A number of bytes, or one with K, M, G or T (powers of 1024)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The size in bytes."""
        if isinstance(value, int):
            return value
        number, suffix = (value[:-1], value[-1].upper()) if value[-1:].isalpha() else (value, "")
        if not number.isdecimal() or suffix not in SUFFIXES:
            self.fail(f"{value!r} is not a size: a number of bytes, or one followed by K, M, G or T", param, ctx)
        return int(number) * SUFFIXES[suffix]


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
size_option = click.option("--size", type=SizeType(), help="Size of the disk, e.g. 20G. Default: the image's size.")


state_option = click.option(
    "--state",
    type=click.Path(path_type=Path),
    default=STATE,
    show_default=True,
    envvar="VIRTMAN_STATE",
    help="What survives a reboot: records, caches, disks.",
)
volt_option = click.option(
    "--volt", default="http://127.0.0.1:8700", show_default=True, envvar="VIRTMAN_VOLT", help="Volt's address."
)
libvirt_option = click.option(
    "--libvirt",
    default="qemu:///system",
    show_default=True,
    envvar="VIRTMAN_LIBVIRT",
    help="libvirt that runs the VMs.",
)
stack_option = click.option(
    "--stack",
    type=click.Choice(["auto", "kernel", "userspace"]),
    default="auto",
    show_default=True,
    envvar="VIRTMAN_STACK",
    help="auto: kernel if this machine can, see virtman doctor; what the host has already keeps its stack.",
)


def _ip_address(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    import ipaddress

    try:
        return value and str(ipaddress.ip_address(value))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


address_option = click.option(
    "--address",
    envvar="VIRTMAN_ADDRESS",
    callback=_ip_address,
    help="IP address at which other hosts reach this one.  [default: the one from which it reaches Volt]",
)


def driver_option(layer: str) -> Callable[[F], F]:
    """An option that takes another driver than the stack's for one layer."""
    return click.option(
        f"--{layer}",
        metavar="DRIVER",
        envvar=f"VIRTMAN_{layer.upper()}",
        help=f"The {layer} driver, if not the stack's.",
    )


def emit(value: Any) -> None:
    """Print JSON."""
    click.echo(json.dumps(value, indent=2))


def table(columns: list[str], rows: list[list[Any]]) -> None:
    """Print a table, in full width when the output is not a terminal. Brackets and colons mean nothing in it."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        drawn.add_column(column, no_wrap=True)
    for row in rows:
        drawn.add_row(*(str(cell) if cell is not None else "-" for cell in row))
    if sys.stdout.isatty():
        Console(markup=False, emoji=False).print(drawn)
        return
    plain = Console(width=WIDE, file=io.StringIO(), markup=False, emoji=False)
    with plain.capture() as capture:
        plain.print(drawn)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def size_text(size: int | None) -> str:
    """Bytes for people."""
    from rich.filesize import decimal

    return "-" if size is None else decimal(size)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--socket", type=click.Path(path_type=Path), default=Path("/run/virtman/agent.sock"), show_default=True,
    envvar="VIRTMAN_SOCKET", help="The agent's socket.",
)  # fmt: skip
@click.version_option(package_name="virtman")
@click.pass_context
def main(context: click.Context, socket: Path) -> None:
    """Start many VMs from one image at once, without copying it first.

    \b
    Examples:
      virtman publish debian-12 debian-12.qcow2   # on one host, the origin
      virtman create web-1 debian-12              # on any host: prints the disk's path
      virtman boot web-2 debian-12 --memory 2048  # disk and running VM in one go
      virtman tree debian-12                      # who reads from whom
    \b
    Shell completion (bash; zsh and fish alike):
      eval "$(_VIRTMAN_COMPLETE=bash_source virtman)"
    """
    context.obj = socket


@main.command()
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
@click.pass_context
def publish(context: click.Context, name: str, file: Path, as_json: bool) -> None:
    """Publish FILE (raw or qcow2) as image NAME; this host becomes its origin.

    \b
    Example: virtman publish debian-12 ./debian-12.qcow2
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    screen = Console(stderr=True)
    hidden = not screen.is_terminal  # or it would put an empty line before an error
    with agent(context) as client, Progress(*columns, console=screen, transient=True, disable=hidden) as bar:
        tasks: dict[str, Any] = {}

        def show(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step, total=total)
            bar.update(tasks[step], completed=done)

        image = client.publish(name, file.absolute(), show)
    if as_json:
        emit(image)
    else:
        click.echo(f"{image['name']}: {size_text(image['size'])}, {image['digest']}")


@main.command()
@click.argument("vm")
@click.argument("image")
@size_option
@json_option
@click.pass_context
def create(context: click.Context, vm: str, image: str, size: int | None, as_json: bool) -> None:
    """Create a disk for VM from IMAGE and print its path. Asked again, it prints the same path.

    \b
    Example: qemu-system-x86_64 -m 1G -nographic -drive file=$(virtman create web-1 debian-12),if=virtio
    """
    with agent(context) as client:
        answer = client.create(vm, image, _whole_sectors(size))
    emit(answer) if as_json else click.echo(answer["path"])


def _whole_sectors(size: int | None) -> int | None:
    with one_line_errors():
        if size is not None and (size % 512 or size <= 0):
            raise BadSize(f"a disk of {size} bytes is not possible: the size is a positive multiple of 512")
    return size


@main.command()
@click.argument("vm")
@json_option
@click.pass_context
def destroy(context: click.Context, vm: str, as_json: bool) -> None:
    """Destroy VM and its disk for good; a running VM is switched off."""
    with agent(context) as client:
        client.destroy(vm)
    if as_json:
        emit({"destroyed": vm})


@main.command(name="list")
@json_option
@click.pass_context
def list_vms(context: click.Context, as_json: bool) -> None:
    """List the VMs of this host."""
    with agent(context) as client:
        vms = client.vms()
    if as_json:
        emit(vms)
    else:
        table(["VM", "IMAGE", "SIZE", "STATE"], [[v["vm"], v["image"], size_text(v["size"]), v["state"]] for v in vms])


@main.command()
@json_option
@click.pass_context
def status(context: click.Context, as_json: bool) -> None:
    """Show this host's images with their paths, bytes fetched and cache hits."""
    with agent(context) as client:
        answer = client.status()
    if as_json:
        emit(answer)
        return
    volt = answer["volt"]
    link = "connected" if volt["connected"] else f"NOT connected: {volt['trouble']}"
    click.echo(f"host {answer['host']}, Volt at {volt['url']} {link}; VMs run with {answer['accel']['use']}")
    rows = [
        [
            image["image"], image["role"], image["phase"] if image["serving"] else f"{image['phase']}, NOT served",
            image["slot"], size_text(image["fetched_bytes"]), size_text(image["cache_hit_bytes"]), len(image["vms"]),
            ", ".join(f"{path['host']} ({path['state']})" for path in image["paths"]) or "-",
        ]
        for image in answer["images"]
    ]  # fmt: skip
    table(["IMAGE", "ROLE", "PHASE", "SLOT", "FETCHED", "CACHE HITS", "VMS", "PATHS"], rows)
    for stray in answer["strays"]:
        click.echo(f"the disk of {stray} has no record; it is left alone", err=True)
    for name in answer["damaged"]:
        click.echo(f"the record of {name} cannot be read; all that it may need is left alone", err=True)
    if trouble := answer["disks"]["trouble"]:
        click.echo(f"VMs' disks: {trouble}", err=True)
    for volume in answer["cache_volumes"]:
        if trouble := VOLUME_TROUBLE.get(volume["state"]):
            click.echo(f"the cache volume {volume['path']} {trouble}; see: virtman cache list", err=True)


@main.command()
@click.argument("vm")
@click.argument("image")
@size_option
@click.option("--memory", type=click.IntRange(min=32), default=1024, show_default=True, help="MiB.")
@click.option("--cpus", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--network", default="user", show_default=True, help="user, none, network:NAME or bridge:NAME of libvirt."
)
@click.option("--cloud-init", type=click.File(), help="User data for cloud-init.")
@click.option("--ssh-key", type=click.File(), multiple=True, help="A file with public keys to let in; may be repeated.")
@json_option
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
    with agent(context) as client:
        answer = client.boot(vm, image, _whole_sectors(size), ssh_keys=keys, user_data=user_data, **how)
    emit(answer) if as_json else click.echo(f"{vm} is running on {answer['path']}; see: virtman console {vm}")


def _text(file: Any) -> str:
    try:
        text: str = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"cannot read {file.name} as text: {error}") from error
    return text


@main.command()
@click.argument("vm")
@click.option("--force", is_flag=True, help="Cut the power instead of asking the VM to shut down.")
@json_option
@click.pass_context
def stop(context: click.Context, vm: str, force: bool, as_json: bool) -> None:
    """Shut VM down; its disk stays."""
    with agent(context) as client:
        client.stop(vm, force=force)
    if as_json:
        emit({"stopped": vm})


@main.command()
@click.argument("vm")
@click.option("--log", is_flag=True, help="Print what the console has printed so far, and end.")
@json_option
@click.pass_context
def console(context: click.Context, vm: str, log: bool, as_json: bool) -> None:
    """Connect to VM's serial console; leave with Ctrl-]."""
    import os

    with agent(context) as client:
        where = client.console(vm)
    if as_json:
        emit(where)
        return
    try:
        if log:
            click.echo(Path(where["log"]).read_bytes(), nl=False)
        else:
            os.execvp("virsh", ["virsh", "--connect", where["libvirt"], "console", where["domain"]])  # noqa: S606
    except FileNotFoundError as error:
        missing = f"{vm} has printed nothing; was it booted?" if log else "virsh is missing: package libvirt-clients"
        raise Failure(missing) from error


@main.command()
@click.argument("image")
@json_option
@click.pass_context
def tree(context: click.Context, image: str, as_json: bool) -> None:
    """Draw the tree of hosts that share IMAGE."""
    with agent(context) as client:
        answer = client.tree(image)
    if as_json:
        emit(answer)
        return
    from rich.console import Console

    from volt.client import ImageTree
    from volt.treeview import render

    Console().print(render(ImageTree.model_validate(answer)))


@main.command()
@json_option
@click.pass_context
def images(context: click.Context, as_json: bool) -> None:
    """List the published images."""
    with agent(context) as client:
        answer = client.images()
    if as_json:
        emit(answer)
        return
    rows = [
        [i["name"], size_text(i["size"]), ", ".join(i["origins"]), i["nodes"], i["here"], size_text(i["held_bytes"])]
        for i in answer
    ]
    table(["IMAGE", "SIZE", "ORIGIN", "HOSTS", "HERE", "CACHED HERE"], rows)


@main.group()
def cache() -> None:
    """Say which disks and files this host keeps in what it has read.

    \b
    Example: virtman cache list
    """


@cache.command(name="list")
@json_option
@click.pass_context
def list_volumes(context: click.Context, as_json: bool) -> None:
    """List the volumes of the cache and the images that use them now.

    \b
    Example: virtman cache list
    """
    with agent(context) as client:
        volumes = client.volumes()
    if as_json:
        emit(volumes)
        return
    rows = [[v["path"], size_text(v["size"]), v["state"], ", ".join(v["images"]) or "-"] for v in volumes]
    table(["PATH", "SIZE", "STATE", "IMAGES"], rows)


@cache.command(name="add")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
@click.pass_context
def add_volume(context: click.Context, path: Path, as_json: bool) -> None:
    """Let the cache use PATH: an empty disk, or a file that is made.

    A partition will do too. What holds anything, or is in use, is refused.

    \b
    Examples:
      virtman cache add /dev/disk/by-id/nvme-FAST_4711
      virtman cache add /srv/virtman-cache
    """
    with agent(context) as client:
        volume = client.add_volume(path.absolute())
    emit(volume) if as_json else click.echo(f"{volume['path']}: {size_text(volume['size'])}, {volume['state']}")


@cache.command(name="remove")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
@click.pass_context
def remove_volume(context: click.Context, path: Path, as_json: bool) -> None:
    """Take PATH from the cache: a file is deleted, a disk is free again. Images that are read go on.

    \b
    Example: virtman cache remove /dev/disk/by-id/nvme-FAST_4711
    """
    with agent(context) as client:
        client.remove_volume(path.absolute())
    if as_json:
        emit({"removed": str(path.absolute())})


@main.command()
@json_option
@click.pass_context
def gc(context: click.Context, as_json: bool) -> None:
    """Remove the stacks, caches and published files that nobody needs."""
    with agent(context) as client:
        answer = client.gc()
    if as_json:
        emit(answer)
    else:
        click.echo(f"removed {len(answer['stacks'])} stacks, freed {size_text(answer['freed_bytes'])}")


@main.command()
@json_option
@click.pass_context
def repair(context: click.Context, as_json: bool) -> None:
    """Compare this host with the agent's records; finish or undo what was cut off."""
    with agent(context) as client:
        answer = client.repair()
    if as_json:
        emit(answer)
    else:
        click.echo("; ".join(f"{kind}: {', '.join(names) or 'nothing to do'}" for kind, names in answer.items()))


@main.command()
@click.option("--force", is_flag=True, help="Even while VMs run; their reads wait until the agent is started again.")
@json_option
@click.pass_context
def suspend(context: click.Context, force: bool, as_json: bool) -> None:
    """Stop serving images, before a reboot; the agent's next start brings them back with their caches."""
    with agent(context) as client:
        client.suspend(force=force)
    if as_json:
        emit({"suspended": True})


@main.command()
@click.option(
    "--kernel", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Default: the newest in /boot."
)
@json_option
def accel(kernel: Path | None, as_json: bool) -> None:
    """Prove whether KVM works here, by booting a Linux kernel with it."""
    import tempfile

    from virtman.accel import choose_accel

    with tempfile.TemporaryDirectory() as folder:
        verdict = choose_accel(kernel, Path(folder) / "verdict.json")
    if as_json:
        emit({"accel": verdict.accel, "reason": verdict.reason})
    else:
        click.echo(f"{verdict.accel}: {verdict.reason}")


@main.command()
@stack_option
@address_option
@state_option
@volt_option
@libvirt_option
@json_option
def doctor(stack: str, address: str | None, state: Path, volt: str, libvirt: str, as_json: bool) -> None:
    """Show what this machine has of all that the stacks need, and how to install the rest.

    It looks as an agent with the same settings would, needs none and changes nothing. Exit code 0 if the stack can run
    here (auto: any of them), else 1.

    \b
    Example: virtman doctor --stack kernel
    """
    from virtman.doctor import advice, examine, rows
    from virtman.stackchoice import source_address

    with one_line_errors():
        found = examine(stack, state, address or source_address(volt), libvirt)
    if as_json:
        emit(found.as_json())
    else:
        table(["STACK", "LAYER", "DRIVER", "THERE", "MISSING"], list(rows(found)))
        click.echo()
        for line in advice(found):
            click.echo(line)
    sys.exit(0 if found.runs else 1)


@main.command(name="agent")
@click.option(
    "--name", envvar="VIRTMAN_NAME", help="This host's name at Volt. Default: its host name up to the first dot."
)
@state_option
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    default=Path("/run/virtman"),
    show_default=True,
    envvar="VIRTMAN_RUN",
    help="Sockets; a short path.",
)
@volt_option
@click.option(
    "--volt-token-file",
    type=click.Path(path_type=Path),
    envvar="VIRTMAN_VOLT_TOKEN_FILE",
    help="Bearer token for Volt.",
)
@stack_option
@driver_option("attach")
@driver_option("cache")
@driver_option("export")
@driver_option("snapshot")
@address_option
@click.option(
    "--path-policy",
    type=click.Choice(PATH_POLICIES),
    default=PATH_POLICIES[0],
    show_default=True,
    envvar="VIRTMAN_PATH_POLICY",
    help="From which live parents the kernel stack reads: the first, or all by this selector.",
)
@libvirt_option
@click.option(
    "--accel",
    type=click.Choice(["auto", "kvm", "tcg"]),
    default="auto",
    show_default=True,
    envvar="VIRTMAN_ACCEL",
    help="auto: KVM if it proves to work.",
)
@click.option(
    "--probe-kernel", type=click.Path(path_type=Path), help="Kernel to prove KVM with. Default: the newest in /boot."
)
@click.option(
    "--idle-grace",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    help="Seconds to keep a stack that nobody needs.",
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def run_agent(
    log_level: str, name: str | None, stack: str, address: str | None, attach: str | None, cache: str | None,
    export: str | None, snapshot: str | None, **settings: Any,
) -> None:  # fmt: skip
    """Run this host's agent in the foreground.

    \b
    Example: virtman agent --volt http://10.0.0.1:8700 --volt-token-file /etc/virtman/token --stack userspace
    """
    import logging
    import socket
    from dataclasses import asdict

    from virtman.config import AgentConfig
    from virtman.server import serve
    from virtman.stackchoice import choose, source_address

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for library in ("httpx", "httpcore"):
        logging.getLogger(library).setLevel(logging.WARNING)
    name = name or socket.gethostname().partition(".")[0]
    address = address or source_address(settings["volt"])
    overrides = {"attach": attach, "cache": cache, "export": export, "snapshot": snapshot}
    with one_line_errors():
        drivers = choose(stack, overrides, settings["state"], address)
        serve(AgentConfig(name=name, address=address, **asdict(drivers), **settings))
