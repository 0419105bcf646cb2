"""``python -m lab up --hosts N``: a cluster to play with, until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import logging
import shutil
import sys
import threading

from lab.cluster import Cluster, proven_accel, tool
from lab.errors import LabError
from lab.guest import guest
from lab.libvirt import PrivateLibvirt
from lab.signals import terminating_is_interrupting
from lab.tools import BUILD


def main() -> int:
    """Keep a cluster in the foreground. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    commands = parser.add_subparsers(required=True)
    up = commands.add_parser("up", help="start Volt, an origin and hosts; Ctrl-C stops them")
    up.add_argument("--hosts", type=int, default=4, help="hosts besides the origin (default 4)")
    options = parser.parse_args()
    try:
        with terminating_is_interrupting():
            keep_up(options.hosts)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


def keep_up(hosts: int) -> None:
    """Start a cluster, say how to use it, and stop it when interrupted. Raises LabError."""
    made, folder = guest(), BUILD / "lab"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    logging.basicConfig(filename=folder / "lab.log", level="INFO")
    accel = proven_accel(made.kernel)
    with (
        PrivateLibvirt(folder / "libvirt") as libvirt,
        Cluster(folder, hosts + 1, libvirt=libvirt.uri, accel=accel) as it,
    ):
        with contextlib.suppress(KeyboardInterrupt):
            print(
                f"Volt:    {it.volt_url}   ({tool('volt')} hosts --help)\nlibvirt: {libvirt.uri}\nlogs:    {folder}\n"
            )
            print(f"A guest to publish: {made.disk}\nTalk to a host's agent, for example:\n")
            for host, name in enumerate(it.names):
                print(f"  {tool('virtman')} --socket {it.socket(host)} status    # {name}")
            print("\nCtrl-C stops everything.", flush=True)
            threading.Event().wait()
        print("stopping")


if __name__ == "__main__":
    sys.exit(main())
