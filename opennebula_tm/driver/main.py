"""The entry of all scripts: ``tm`` or ``datastore``, the script's name, and what OpenNebula gave it.

OpenNebula shows its users the lines of standard error that do not begin with ``ERROR:``, ``INFO:`` and the like, joined
without anything between them. So there is exactly one.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from opennebula_tm.driver import names, settings
from opennebula_tm.driver.backup import Backups
from opennebula_tm.driver.datastore import Datastore
from opennebula_tm.driver.errors import DriverError, Refused
from opennebula_tm.driver.remote import Hosts
from opennebula_tm.driver.system import SystemDatastore, is_systems, stdin
from opennebula_tm.driver.tm import TransferManager

log = logging.getLogger(__name__)

LOGGED = ("ERROR:", "INFO:", "WARN:", "DEBUG:", "-")
"""How a line begins that no user would see."""
SYSTEM_ONLY = frozenset({"context", "mkimage", "mkswap", "monitor_ds"})
BACKUPS = frozenset({"prebackup", "prebackup_live", "postbackup", "postbackup_live", "restore"})


def main(argv: Sequence[str], remotes: Path) -> int:
    """Run a script's action. ``remotes``: OpenNebula's folder of them. Returns the exit code."""
    os.umask(0o007)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what runs for it is ended, too
    kind, script, *arguments = argv
    logged = logging.StreamHandler(sys.stderr)
    logged.setFormatter(Prefixed(f"%(levelname)s: {script}: %(message)s"))
    logging.basicConfig(handlers=[logged], level=logging.INFO, force=True)
    logging.addLevelName(logging.WARNING, "WARN")
    try:
        if kind == "tm":
            transfer(script, arguments, remotes)
        else:
            Datastore(settings.read(remotes), remotes).run(script, stdin())
    except DriverError as error:
        say(str(error))
        return 1
    except Exception as error:
        log.exception("this is a fault of the driver")
        say(f"{script} failed by a fault of the driver, see the log: {type(error).__name__}: {error}")
        return 1
    return 0


class Prefixed(logging.Formatter):
    """Begins each line with what keeps it from users: what has no such word is the reason that they are told."""

    def format(self, record: logging.LogRecord) -> str:
        """All of a record."""
        return super().format(record).replace("\n", f"\n{record.levelname}: ")


def say(text: str) -> None:
    """Say in one line why it failed."""
    line = " ".join(text.split())
    sys.stderr.write(f"VirtMan: {line}\n" if line.startswith(LOGGED) else f"{line}\n")


def transfer(script: str, arguments: list[str], remotes: Path) -> None:
    """One of the transfer manager's scripts. Raises DriverError, SystemExit."""
    action, _, kind = script.partition(".")
    system = SystemDatastore(remotes / "tm")
    if action == "monitor":
        system.monitor(Hosts(settings.read(remotes)), arguments, stdin())
    elif action in SYSTEM_ONLY:
        system.as_ssh(action, arguments)
    elif action == "premigrate":
        system.premigrate(arguments, stdin())
    elif action in ("postmigrate", "failmigrate"):
        system.after_migration(action, arguments)
    elif action in BACKUPS:
        _backup(Backups(settings.read(remotes), remotes), action, arguments)
    elif arguments and action in ("mv", "delete", "resize") and is_systems(arguments):
        if action == "mv" and names.place(arguments[0]).disk is None:
            _counted(action, arguments, 4)
            move = partial(system.run_ssh, action, arguments)
            TransferManager(settings.read(remotes)).mv_folder(*arguments[:3], move=move)
        else:
            system.as_ssh(action, arguments)
    else:
        _disk_action(TransferManager(settings.read(remotes)), action, kind, arguments)


def _backup(backups: Backups, action: str, arguments: list[str]) -> None:
    if action == "restore":
        _counted(action, arguments, 5)
        backups.restore(*arguments)
        return
    _counted(action, arguments, 6)
    folder, disks, _domain, _job, vm, _datastore = arguments
    if action.startswith("pre"):
        backups.prebackup(folder, disks, vm, stdin(), live=action.endswith("_live"))
    else:
        backups.postbackup(folder, vm)


def _counted(action: str, arguments: list[str], count: int) -> None:
    if len(arguments) != count:
        raise Refused(
            f"{action} takes {count} arguments and got {len(arguments)}: a name with a blank cannot be handed over"
        )


def _disk_action(manager: TransferManager, action: str, kind: str, arguments: list[str]) -> None:
    actions: dict[str, tuple[int, Callable[..., None]]] = {
        "clone": (4, manager.clone), "ln": (4, manager.ln), "mvds": (4, manager.mvds), "cpds": (5, manager.cpds),
        "delete": (3, manager.delete), "mv": (4, manager.mv), "resize": (4, manager.resize),
        "snap_create": (4, manager.snap_create), "snap_create_live": (4, manager.snap_create_live),
        "snap_revert": (4, manager.snap_revert), "snap_delete": (4, manager.snap_delete),
    }  # fmt: skip
    if action not in actions:
        raise Refused(f"the transfer manager has no action {action}")
    count, act = actions[action]
    _counted(action, arguments, count)
    if action in ("clone", "ln"):
        act(*arguments, system=kind)
    else:
        act(*arguments)
