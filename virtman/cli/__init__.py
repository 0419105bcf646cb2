"""The command line of VirtMan: a module for each noun, and ``options`` and ``output`` for what they share.

Each command starts a Python of its own, dozens of them in a wave of new VMs. So a command imports only its own module,
and what is slow to import is imported where it is used.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import click

from virtman.places import join_session
from volt.groups import Group

MODULES = {
    "vms": (
        "create", "boot", "list", "show", "start", "stop", "console", "resize", "rename", "attach-disk", "detach-disk",
        "destroy",
    ),
    "snapshots": ("snapshot",),
    "copies": ("clone", "export", "send", "receive"),
    "migrate": ("migrate", "arrival"),
    "images": ("publish", "unpublish", "images", "hydrate", "tree"),
    "deploy": ("deploy", "deployments", "hosts"),
    "bench": ("bench",),
    "cache": ("cache",),
    "host": ("status", "gc", "repair", "suspend", "accel", "doctor"),
    "agent": ("agent",),
}  # fmt: skip
"""The names of the commands in each module."""


class Commands(Group):
    """Imports a command's module when the command is used."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """The names of all commands."""
        return sorted(name for names in MODULES.values() for name in names)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, with its module imported."""
        for module, names in MODULES.items():
            if cmd_name in names:
                found = vars(importlib.import_module(f"virtman.cli.{module}")).values()
                return next(each for each in found if isinstance(each, click.Command) and each.name == cmd_name)
        return None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--socket", type=click.Path(path_type=Path), envvar="VIRTMAN_SOCKET",
    help="The agent's socket.  [default: that of this user's agent; root's is /run/virtman/agent.sock]",
)  # fmt: skip
@click.version_option(package_name="virtman")
@click.pass_context
def main(context: click.Context, socket: Path | None) -> None:
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
    logging.getLogger("virtman").addHandler(logging.NullHandler())  # what a command has to say it prints itself
    join_session()
    context.obj = socket
