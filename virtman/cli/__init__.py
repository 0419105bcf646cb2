"""The command line of VirtMan: a module for each noun, and ``options`` and ``output`` for what they share.

What is slow to import is imported where it is used, so that ``virtman create`` is quick.
"""

from __future__ import annotations

import logging
from pathlib import Path

import click

from virtman.cli import agent, cache, copies, host, images, migrate, snapshots, vms
from virtman.places import join_session


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
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


for command in (
    *vms.COMMANDS, *snapshots.COMMANDS, *copies.COMMANDS, *migrate.COMMANDS, *images.COMMANDS, *cache.COMMANDS,
    *host.COMMANDS, *agent.COMMANDS,
):  # fmt: skip
    main.add_command(command)
