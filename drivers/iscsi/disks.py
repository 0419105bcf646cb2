"""Disks that parents show, and whether they are the image."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from drivers.base import Image
from drivers.errors import CommandFailed, CommandTimedOut
from drivers.host.command import run
from drivers.iscsi.names import serial_of
from drivers.iscsi.records import Target
from drivers.iscsi.sessions import Session, may_go, word
from drivers.kernel.devmapper import SECTOR

log = logging.getLogger(__name__)

_SERIAL = "device/vpd_pg80"
"""The page with the serial number (Linux: drivers/scsi/scsi_sysfs.c)."""

NO_ANSWER = "its disk does not answer reads"

READ_LIMIT = 5.0
"""Seconds for which a disk that is to be a path may take to answer a read. It waits while its parent has no path."""

_READ = 4096
"""Bytes."""

ANEW = 10.0
"""Seconds. Each time a disk is asked anew the kernel tells udev twice that it changed (Linux: drivers/scsi/sd.c,
sd_read_write_protect_flag): whoever waits for udev waits for ever, if it is done too often."""


def number_of(session: Session | None, image: Image) -> str | None:
    """The ``major:minor`` of a session's disk, if it can be read now. Raises OSError."""
    return _number(session, image, _misfit) if session is not None and session.logged_in else None


def lasting_number_of(session: Session | None, image: Image) -> str | None:
    """As ``number_of``, but also of one that cannot be read now, and may be again. Raises OSError."""
    return _number(session, image, alien) if session is not None else None


def _number(session: Session, image: Image, trouble: Callable[[Path, Image], str]) -> str | None:
    with may_go():
        disk = session.disk()
        if disk is not None and not trouble(disk, image):
            return word(f"{disk}/dev")
    return None


def _misfit(disk: Path, image: Image) -> str:
    """Why a disk is not the image, as far as sysfs knows. Raises OSError."""
    if word(f"{disk}/device/state") != "running":
        return "its disk does not run"
    return alien(disk, image)


def alien(disk: Path, image: Image) -> str:
    """Why a disk is not the image, whatever its state. Raises OSError."""
    if int(word(f"{disk}/size")) * SECTOR != image.size:
        return "its disk is of another size"
    serial = disk / _SERIAL
    if not serial.exists() or serial_of(image).encode() not in serial.read_bytes():
        return "its disk is of another image"
    return ""


def flaw(disk: Path, image: Image) -> str:
    """Why a disk cannot be a path to the image, though it may answer reads. Raises OSError."""
    if word(f"{disk}/device/state") == "offline":
        (disk / "device/state").write_text("running")  # the kernel gave it up; it answers again, or not
    if trouble := _misfit(disk, image):
        return trouble
    if int(word(f"{disk}/inflight").split()[0]):  # the kernel's, which looks for partitions, or that of an earlier look
        return "a read of its disk waits"
    return ""


def answers(disk: Path, seconds: float = READ_LIMIT) -> bool:
    """Whether a read of a disk's beginning comes back, within so many seconds.

    A parent that cannot read what it serves still answers every command that reads nothing. A process of its own reads,
    since nothing can end a read but its answer: it is left behind if none comes (drivers/host/command.py).
    """
    try:
        run(["dd", f"if=/dev/{disk.name}", "of=/dev/null", f"bs={_READ}", "count=1", "iflag=direct", "status=none"],
            timeout=seconds)  # fmt: skip
    except (CommandFailed, CommandTimedOut) as error:
        log.info("reading %s: %s", disk.name, error)
        return False
    return True


class Asking:
    """Has the kernel ask disks anew what they are: each target's once in ``ANEW`` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` in seconds."""
        self._clock = clock
        self._asked: dict[Target, float] = {}

    def ask(self, target: Target, disk: Path) -> None:
        """Unless that was done lately. Raises OSError.

        Of a disk that was found while its connection broke the kernel knows no size, and it does not ask again by
        itself (Linux: drivers/scsi/sd.c, sd_read_capacity). Whether a disk has a serial number is asked once in its
        life (drivers/scsi/scsi_sysfs.c): one without is dropped, to be found anew.
        """
        now = self._clock()
        if now - self._asked.get(target, -math.inf) >= ANEW:
            self._asked[target] = now
            (disk / ("device/rescan" if (disk / _SERIAL).exists() else "device/delete")).write_text("1")
