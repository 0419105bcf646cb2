"""Keeps udev and its listeners (blkid, multipathd, lvm) away from the devices that hold images and VMs' disks.

A probe of a new device reads from the parents, about 0.7 MB each, waits in a map whose parents are not there yet, and
holds up whoever removes it. udev looks at a loop device whenever somebody who could write has closed it: a dozen times
while a VM's disk is made. The rules are for as long as the host runs: they are written before the first device.

A loop device that is over nothing, yet or any more, has nothing to probe, whoever made it; when it is over something
it is seen again. Else udev, which begins with a new device when nobody can tell that it will be ours, goes on when it
is: the rule of bcache-tools reads it. Whether it is over something is asked first: it may be so one line later.
LVM takes no word of udev's: by its own file (deploy/lvm) it leaves alone what is called /dev/mapper/virtman-… or has a
link in /dev/virtman, which those get that have no name of ours.

(udev(7); the flags are those of the rules that come with dmsetup, multipath-tools and systemd.)

The rules of sg3-utils, which multipath-tools brings along, begin on Debian 13 a program for each event of each device
without a serial number, of whatever kind, to write to the journal that it has none. So ours have one.
"""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

from drivers.host.command import run
from drivers.kernel.scsi import MAKER, MODEL
from drivers.names import STATE

log = logging.getLogger(__name__)

FILE = Path("/run/udev/rules.d/05-virtman.rules")

_NAMEABLE = re.compile(r"[\w/.,+@:~-]+")
"""A path that means itself in a rule."""

_LOCK = threading.Lock()
_folders = [str(STATE)]
"""Those with files of ours, as the kernel calls them."""
_applied: set[str] = set()
"""The rules that this process has had udev know."""


def leave_alone(folder: Path) -> None:
    """Have udev leave the loop devices of all files below a folder alone from the next device on."""
    real = str(folder.resolve())
    if not _NAMEABLE.fullmatch(real):
        log.warning("udev will look at our loop devices, which costs time: no rule can name %s", real)
    elif real not in _folders:
        _folders.append(real)


def folders() -> list[str]:
    return list(_folders)


def rules() -> str:
    files = "|".join(f"{folder}/*" for folder in _folders)
    return f"""\
# Written by VirtMan: nothing has to probe its devices.
SUBSYSTEM!="block", GOTO="virtman_end"
KERNEL=="dm-*", ATTR{{dm/name}}=="virtman-*", GOTO="virtman_own"
KERNEL=="loop*", ENV{{DEVTYPE}}=="disk", TEST!="loop/backing_file", GOTO="virtman_unprobed"
KERNEL=="loop*", ATTR{{loop/backing_file}}=="/dev/*/virtman-*|{files}", GOTO="virtman_own"
KERNEL=="bcache*", ATTR{{bcache/../dm/name}}=="virtman-*", GOTO="virtman_own"
KERNEL=="sd*", ATTRS{{vendor}}=="{MAKER}*", ATTRS{{model}}=="{MODEL}*", GOTO="virtman_own"
GOTO="virtman_end"

LABEL="virtman_own"
KERNEL!="dm-*", SYMLINK+="virtman/%k"
OPTIONS:="nowatch"
LABEL="virtman_unprobed"
ENV{{DM_UDEV_DISABLE_SUBSYSTEM_RULES_FLAG}}="1"
ENV{{DM_UDEV_DISABLE_DISK_RULES_FLAG}}="1"
ENV{{DM_UDEV_DISABLE_OTHER_RULES_FLAG}}="1"
ENV{{UDEV_DISABLE_PERSISTENT_STORAGE_RULES_FLAG}}="1"
ENV{{nompath}}="1"
ENV{{SYSTEMD_READY}}="0"
KERNEL!="sd*", ENV{{ID_SERIAL}}="virtman-%k"
LABEL="virtman_end"
"""


def apply() -> None:
    """Have udev know the rules; nothing happens if it does. Raises CommandFailed, ToolMissing, OSError."""
    with _LOCK:
        wanted = rules()
        there = FILE.exists() and FILE.read_text() == wanted
        if there and wanted in _applied:
            return
        if not there:
            FILE.parent.mkdir(parents=True, exist_ok=True)
            fresh = FILE.with_suffix(".new")
            fresh.write_text(wanted)
            fresh.rename(FILE)
        run(["udevadm", "control", "--reload"])  # also if the process that wrote them was killed before
        _applied.add(wanted)
        log.info("udev leaves our devices alone, by %s", FILE)
