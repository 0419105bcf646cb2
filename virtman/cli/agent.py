"""The command that is the agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from drivers.base import PATH_POLICIES
from virtman.cli import options
from virtman.cli.output import one_line_errors
from virtman.places import places


@click.command(name="agent")
@click.option(
    "--name", envvar="VIRTMAN_NAME", help="This host's name at Volt. Default: its host name up to the first dot."
)
@options.state
@options.run
@options.volt
@click.option(
    "--volt-token-file",
    type=click.Path(path_type=Path),
    envvar="VIRTMAN_VOLT_TOKEN_FILE",
    help="Bearer token for Volt.",
)
@options.stack
@options.drivers
@options.address
@click.option(
    "--place",
    "location",
    default="",
    metavar="SITE/RACK",
    envvar="VIRTMAN_PLACE",
    help="Where this host is, e.g. paris/r12. Images cross the links between sites and racks once.",
)
@click.option(
    "--path-policy",
    type=click.Choice(PATH_POLICIES),
    default=PATH_POLICIES[0],
    show_default=True,
    envvar="VIRTMAN_PATH_POLICY",
    help="From which live parents the kernel stack reads: the first, or all by this selector.",
)
@click.option(
    "--group",
    envvar="VIRTMAN_GROUP",
    help="Group whose members may create, copy, send and destroy disks of VMs, and use them. Default: none.",
)
@click.option(
    "--reserve",
    type=options.SizeType(),
    envvar="VIRTMAN_RESERVE",
    help="Space to keep free for what VMs write, e.g. 20G: caches, images, copies and streams leave it."
    "  [default: 3% of the file system and at least 1G; 10% if that is less]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=lambda: places().port,
    envvar="VIRTMAN_PORT",
    help="TCP port at which other hosts read from the chunk store; 0: one that is free, and kept."
    "  [default: 10809; not as root: 0]",
)
@click.option(
    "--cache-limit",
    type=options.SizeType(),
    envvar="VIRTMAN_CACHE_LIMIT",
    help="The most that the chunk store's file takes, e.g. 100G.  [default: half of the file system, at most 256G]",
)
@click.option(
    "--up",
    type=options.SizeType(least=1),
    envvar="VIRTMAN_UP",
    help="The most that the chunk store sends to other hosts in a second, e.g. 100M.  [default: no limit]",
)
@click.option(
    "--down",
    type=options.SizeType(least=1),
    envvar="VIRTMAN_DOWN",
    help="The most that the chunk store reads from other hosts in a second.  [default: no limit]",
)
@click.option(
    "--connections",
    type=click.IntRange(1),
    envvar="VIRTMAN_CONNECTIONS",
    help="Other hosts' connections to the chunk store; further ones wait.  [default: 4096]",
)
@options.libvirt
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
    Example: virtman agent --volt http://10.0.0.1:8700 --volt-token-file /etc/virtman/token --stack chunkstore
    """
    import logging
    import socket
    from dataclasses import asdict

    from virtman.config import AgentConfig
    from virtman.server import serve
    from virtman.stackchoice import choose, known_address

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for library in ("httpx", "httpcore"):
        logging.getLogger(library).setLevel(logging.WARNING)
    name = name or socket.gethostname().partition(".")[0]
    address = address or known_address(settings["volt"], settings["state"])
    overrides = {"attach": attach, "cache": cache, "export": export, "snapshot": snapshot}
    with one_line_errors():
        drivers = choose(stack, overrides, settings["state"], address)
        serve(AgentConfig(name=name, address=address, **asdict(drivers), **settings))
