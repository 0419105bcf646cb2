"""Keeps udev and those who listen to it (blkid, multipathd, lvm) away from the devices that hold images and VMs' disks.

A probe of a new device reads from the parents, about 0.7 MB each, waits in a map whose parents are not there yet, and
holds up whoever removes it. Loop devices of an agent that does not use the usual folder are probed, which only costs
time. The rules are for as long as the host runs: they are written before the first device.

A new loop device is over nothing yet, whoever made it, so there is nothing to probe; when it is over something it is
seen again. Else udev, which begins with the device when nobody can tell that it will be ours, goes on when it is: the
rule of bcache-tools reads it. Whether it is over something is asked first: it may be so one line later.
(udev(7); the flags are those of the rules that come with dmsetup, multipath-tools and systemd.)
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from drivers.base import STATE
from drivers.host.command import run
from drivers.kernel.scsi import MAKER, MODEL

log = logging.getLogger(__name__)

FILE = Path("/run/udev/rules.d/05-virtman.rules")

RULES = f"""\
# Written by VirtMan, whose devices nobody has to look at.
SUBSYSTEM!="block", GOTO="virtman_end"
KERNEL=="dm-*", ATTR{{dm/name}}=="virtman-*", GOTO="virtman_own"
KERNEL=="loop*", ENV{{DEVTYPE}}=="disk", ACTION=="add", TEST!="loop/backing_file", GOTO="virtman_unprobed"
KERNEL=="loop*", ATTR{{loop/backing_file}}=="/dev/*/virtman-*|{STATE}/*", GOTO="virtman_own"
KERNEL=="bcache*", ATTR{{bcache/../dm/name}}=="virtman-*", GOTO="virtman_own"
KERNEL=="sd*", ATTRS{{vendor}}=="{MAKER}*", ATTRS{{model}}=="{MODEL}*", GOTO="virtman_own"
GOTO="virtman_end"

LABEL="virtman_own"
OPTIONS:="nowatch"
LABEL="virtman_unprobed"
ENV{{DM_UDEV_DISABLE_SUBSYSTEM_RULES_FLAG}}="1"
ENV{{DM_UDEV_DISABLE_DISK_RULES_FLAG}}="1"
ENV{{DM_UDEV_DISABLE_OTHER_RULES_FLAG}}="1"
ENV{{UDEV_DISABLE_PERSISTENT_STORAGE_RULES_FLAG}}="1"
ENV{{nompath}}="1"
ENV{{SYSTEMD_READY}}="0"
LABEL="virtman_end"
"""

_LOCK = threading.Lock()


def apply() -> None:
    """Have udev know the rules; nothing happens if it does. Raises CommandFailed, ToolMissing, OSError."""
    with _LOCK:
        if FILE.exists() and FILE.read_text() == RULES:
            return
        FILE.parent.mkdir(parents=True, exist_ok=True)
        fresh = FILE.with_suffix(".new")
        fresh.write_text(RULES)
        fresh.rename(FILE)
        run(["udevadm", "control", "--reload"])
        log.info("udev leaves our devices alone, by %s", FILE)
