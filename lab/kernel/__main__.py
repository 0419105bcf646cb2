"""``python -m lab.kernel up --hosts N [--suite trixie]``: guests to play with, until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import logging
import shutil
import sys
import threading

from lab.errors import LabError
from lab.guest import add_suite
from lab.kernel.cluster import KernelCluster
from lab.kernel.services import Services
from lab.signals import terminating_is_interrupting
from lab.tools import BUILD


def main() -> int:
    """Keep the guests running in the foreground. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab.kernel", description=__doc__)
    commands = parser.add_subparsers(required=True)
    up = commands.add_parser("up", help="start an origin and hosts; Ctrl-C stops them")
    up.add_argument("--hosts", type=int, default=2, help="hosts besides the origin (default 2)")
    add_suite(up)
    options = parser.parse_args()
    try:
        with terminating_is_interrupting():
            keep_up(options.hosts, options.suite)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


def keep_up(hosts: int, suite: str) -> None:
    """Start the guests, say how to reach them, and stop them when interrupted. Raises LabError."""
    folder = BUILD / "kernel-lab"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    logging.basicConfig(filename=folder / "lab.log", level="INFO")
    print("booting the guests (a minute or two)", flush=True)
    with KernelCluster(folder, hosts, suite=suite) as cluster, contextlib.suppress(KeyboardInterrupt):
        print("starting Volt and the agents", flush=True)
        Services(cluster.machines).start()
        print(f"logs: {folder}\nA shell on a guest, or one command there:\n")
        for machine in cluster.machines.values():
            print(f"  {machine.command_line}    # {machine.name}, {machine.address}")
        print("\nCtrl-C stops everything.", flush=True)
        threading.Event().wait()
    print("stopped")


if __name__ == "__main__":
    sys.exit(main())
