"""The command line: install frontend, install host."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from opennebula_tm.driver.deploying import ATTRIBUTE, METHODS
from opennebula_tm.installer import sources, tuning
from opennebula_tm.installer.console import Commands, Console
from opennebula_tm.installer.errors import Refused
from opennebula_tm.installer.frontend import STACKS, FrontEnd, Places
from opennebula_tm.installer.host import ROOT, Access, HostSide

FAILED, MISUSE = 1, 2
SSHD = Path("/etc/ssh/sshd_config")

FRONT_END = """examples:
  install frontend                        show what would change, ask, and do it
  install frontend --stack kernel --yes
  install frontend --method tree          also have all images go to all hosts, from their first VM on
  install frontend --check                exit code 1, and what differs, unless it is installed as this version would
  install frontend --tuning               what caps a wave of VMs
  install frontend --remove               take it all back"""
HOST = """examples:
  install host                            let oneadmin ask this host's agent
  install host --check
  install host --remove"""


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    whole = argparse.ArgumentParser(prog="install", description="Install VirtMan's drivers for OpenNebula.")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    front = commands.add_parser(
        "frontend", help="the drivers and their registration", epilog=FRONT_END, formatter_class=raw
    )
    front.add_argument(
        "--one-location", type=Path, metavar="DIR", help="a self-contained OpenNebula; else its packages'"
    )
    front.add_argument("--stack", choices=STACKS, help="what the hosts' agents run; as before, or chunkstore")
    front.add_argument("--method", choices=METHODS, help=f"{ATTRIBUTE} of the datastores of images that there are")
    front.add_argument("--tuning", action="store_true", help="show what caps a wave of VMs, and change nothing")
    front.add_argument("--force", action="store_true", help="--remove although datastores use the drivers")
    host = commands.add_parser("host", help="access to this host's agent", epilog=HOST, formatter_class=raw)
    host.add_argument("--user", default="oneadmin", help="OpenNebula's user here (default: %(default)s)")
    host.add_argument("--group", default="virtman", help="the group that may ask the agent (default: %(default)s)")
    host.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="a host whose files are below DIR")
    for command in (front, host):
        what = command.add_mutually_exclusive_group()
        what.add_argument("--check", action="store_true", help="change nothing; say what differs")
        what.add_argument("--remove", action="store_true", help="take back what was installed")
        command.add_argument("--yes", action="store_true", help="do not ask")
    return whole


def main(
    argv: Sequence[str] | None = None, *, console: Console | None = None, commands: Commands | None = None,
    package: Path = sources.PACKAGE,
) -> int:  # fmt: skip
    """Run a command. Returns the exit code."""
    chosen = parser().parse_args(argv)
    console = console or Console(chosen.yes)
    commands = commands or Commands()
    try:
        if chosen.command == "frontend":
            return _front_end(chosen, console, commands, package)
        return _host(chosen, console, commands)
    except Refused as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error))
    except KeyboardInterrupt:
        return _fail("interrupted: run it again to end it")


def _front_end(chosen: argparse.Namespace, console: Console, commands: Commands, package: Path) -> int:
    places = Places.of(chosen.one_location)
    front = FrontEnd(places, console, commands, package)
    if chosen.tuning:
        for cap in tuning.caps(places.oned, SSHD):
            console.say(str(cap))
    elif chosen.check:
        methods = front.other_methods(chosen.method) if chosen.method else {}
        return _tell(console, [*front.differences(chosen.stack), *methods.values()])
    elif chosen.remove:
        front.remove(chosen.force)
    else:
        front.install(chosen.stack)
        if chosen.method:
            front.set_method(chosen.method)
    return 0


def _host(chosen: argparse.Namespace, console: Console, commands: Commands) -> int:
    host = HostSide(chosen.root.resolve(), console, commands)
    access = Access(chosen.user, chosen.group)
    if chosen.check:
        return _tell(console, list(host.differences(access)))
    if chosen.remove:
        host.remove()
    else:
        host.install(access)
    return 0


def _tell(console: Console, lines: list[str]) -> int:
    for line in lines:
        console.say(line)
    return FAILED if lines else 0


def _fail(why: str) -> int:
    print(f"install: {why}", file=sys.stderr)
    return FAILED
