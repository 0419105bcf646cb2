"""Options that several commands have, and the agent that they talk to."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import click

from virtman.cli.output import Answer, Failure, one_line_errors
from virtman.places import is_ours, places

if TYPE_CHECKING:
    from virtman.client import AgentClient

F = TypeVar("F", bound=Callable[..., Any])

COMPLETION_TIMEOUT = 2.0
"""Seconds that a shell waits for names."""
SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def command(
    name: str | None = None, *, group: click.Group | None = None, asks_agent: bool = True
) -> Callable[[Callable[..., Answer]], click.Command]:
    """Make a command of a function that returns what is printed: its text, or with --json its value.

    The function gets the client of the agent before its other arguments, if it ``asks_agent``.
    """

    def decorate(run: Callable[..., Answer]) -> click.Command:
        @wraps(run)
        def print_answer(*, as_json: bool, **given: Any) -> None:
            with one_line_errors():
                answer = run(*((_client(),) if asks_agent else ()), **given)
            answer.show(as_json=as_json)

        made = click.command(name)(print_answer)
        made.params.append(click.Option(["--json", "as_json"], is_flag=True, help="Print JSON for scripts."))
        if group is not None:
            group.add_command(made)
        return made

    return decorate


def _client() -> AgentClient:
    from virtman.client import AgentClient

    named: Path | None = click.get_current_context().obj
    socket = named or places().socket
    if named is None and os.path.lexists(socket.parent) and not is_ours(socket.parent):
        raise Failure(f"{socket.parent} belongs to somebody else; say with --socket whose agent you mean")
    return AgentClient(socket)


def stream() -> BinaryIO:
    """The standard input, unbuffered.

    A buffered one waits for all that is asked of it, and the agent cannot refuse what it has not seen. And Python dies
    at its end while another thread waits in it and so has its lock (python/cpython#86883).
    """
    # What stands in for the standard input in tests has nothing below its buffer.
    return cast("BinaryIO", getattr(sys.stdin.buffer, "raw", sys.stdin.buffer))


def output() -> BinaryIO:
    """The standard output, unbuffered for the same reason."""
    return cast("BinaryIO", getattr(sys.stdout.buffer, "raw", sys.stdout.buffer))


def _names(ask: Callable[[AgentClient, click.Context], Iterable[str]]) -> Callable[..., list[str]]:
    """Completes names that the agent knows; without an agent, none."""

    def complete(context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
        from virtman.client import AgentClient
        from virtman.errors import VirtmanError

        # Nothing was run yet that could have put the socket in its place.
        socket = context.find_root().params.get("socket") or places().socket
        try:
            client = AgentClient(socket, timeout=COMPLETION_TIMEOUT)
            return [name for name in ask(client, context) if name.startswith(begun)]
        except VirtmanError:
            return []

    return complete


names_of_vms = _names(lambda client, _context: [one.name for one in client.vms()])
vm = click.argument("vm", shell_complete=names_of_vms)
"""A VM of this host."""
names_of_images = _names(lambda client, _context: [one.name for one in client.images()])
image = click.argument("image", shell_complete=names_of_images)
names_of_both = _names(
    lambda client, _context: sorted({one.name for one in client.vms()} | {one.name for one in client.images()})
)
snapshot = click.argument(
    "name",
    shell_complete=_names(lambda client, context: [one.name for one in client.snapshots(context.params["vm"])]),
)
"""A snapshot of the VM before it."""


class SizeType(click.ParamType[int]):
    """A number of bytes, or one with K, M, G or T (powers of 1024)."""

    name = "size"

    def __init__(self, least: int = 0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The size in bytes."""
        if isinstance(value, int):
            return value
        number, suffix = (value[:-1], value[-1].upper()) if value[-1:].isalpha() else (value, "")
        if not number.isdecimal() or suffix not in SUFFIXES:
            self.fail(f"{value!r} is not a size: a number of bytes, or one followed by K, M, G or T", param, ctx)
        if (size := int(number) * SUFFIXES[suffix]) < self._least:
            self.fail(f"{value!r} is less than {self._least}", param, ctx)
        return size


size = click.option("--size", type=SizeType(), help="Size of the disk, e.g. 20G. Default: the image's size.")


state = click.option(
    "--state",
    type=click.Path(readable=False, path_type=Path),
    default=lambda: places().state,
    envvar="VIRTMAN_STATE",
    help="What survives a reboot: records, caches, disks.  [default: /var/lib/virtman; not as root:"
    " ~/.local/state/virtman]",
)
run = click.option(
    "--run",
    type=click.Path(readable=False, path_type=Path),
    default=lambda: places().run,
    envvar="VIRTMAN_RUN",
    help="Sockets; a short path.  [default: /run/virtman; not as root: $XDG_RUNTIME_DIR/virtman]",
)
volt = click.option(
    "--volt", default="http://127.0.0.1:8700", show_default=True, envvar="VIRTMAN_VOLT", help="Volt's address."
)
libvirt = click.option(
    "--libvirt",
    default=lambda: places().libvirt,
    envvar="VIRTMAN_LIBVIRT",
    help="libvirt that runs the VMs.  [default: qemu:///system; not as root: qemu:///session]",
)
stack = click.option(
    "--stack",
    type=click.Choice(["auto", "kernel", "chunkstore"]),
    default="auto",
    show_default=True,
    envvar="VIRTMAN_STACK",
    help="auto: what this host had before, else chunkstore. See virtman doctor.",
)


def _ip_address(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    import ipaddress

    try:
        return value and str(ipaddress.ip_address(value))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


address = click.option(
    "--address",
    envvar="VIRTMAN_ADDRESS",
    callback=_ip_address,
    help="IP address at which other hosts reach this one.  [default: the one from which it reaches Volt]",
)


def drivers(command: F) -> F:
    """Options that take another driver than the stack's, one for each layer."""
    for layer in ("snapshot", "export", "cache", "attach"):  # what is added last comes first
        named = f"The {layer} driver, if not the stack's."
        command = click.option(f"--{layer}", metavar="DRIVER", envvar=f"VIRTMAN_{layer.upper()}", help=named)(command)
    return command
