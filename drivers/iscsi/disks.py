"""Disks that parents show: whether a disk is the image, and whether it answers reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
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

NOT_RUNNING, READ_WAITS = "its disk does not run", "a read of its disk waits"

READ_LIMIT, PROBE_LIMIT = 5.0, 2.0
"""Seconds within which a disk has to answer a read: before the map uses it, and as a better one than a stalled disk."""

_READ = 4096
"""Bytes."""


def number_of(session: Session | None, image: Image) -> str | None:
    """The ``major:minor`` of a session's disk that is the image, also while the disk cannot be read. Raises OSError."""
    with may_go():
        disk = session.disk() if session is not None else None
        if disk is not None and not alien(disk, image):
            return word(f"{disk}/dev")
    return None


def readable_number_of(session: Session | None, image: Image) -> str | None:
    """As ``number_of``, but None while the disk cannot be read. Raises OSError."""
    with may_go():
        disk = session.disk() if session is not None and session.logged_in else None
        if disk is not None and _runs(disk):
            return number_of(session, image)
    return None


def unfit(disk: Path, image: Image) -> str:
    """What keeps a disk from being a path to the image; nothing if it may be asked for a read. Raises OSError."""
    if not _runs(disk):
        return NOT_RUNNING
    if trouble := alien(disk, image):
        return trouble
    if int(word(f"{disk}/inflight").split()[0]):  # the kernel's, which looks for partitions, or an earlier probe
        return READ_WAITS
    return ""


def alien(disk: Path, image: Image) -> str:
    """Why a disk is not the image; nothing if it is. Raises OSError."""
    if int(word(f"{disk}/size")) * SECTOR != image.size:
        return "its disk is of another size"
    serial = disk / _SERIAL
    if not serial.exists() or serial_of(image).encode() not in serial.read_bytes():
        return "its disk is of another image"
    return ""


def answers(disk: Path, seconds: float = READ_LIMIT) -> bool:
    """Whether a disk answers a read of its beginning within so many seconds.

    A parent that cannot read what it serves still answers every command that reads nothing. A process of its own reads,
    since only an answer ends a read: a process that gets none is left behind (drivers/host/command.py).
    """
    try:
        run(["dd", f"if=/dev/{disk.name}", "of=/dev/null", f"bs={_READ}", "count=1", "iflag=direct", "status=none"],
            timeout=seconds)  # fmt: skip
    except (CommandFailed, CommandTimedOut) as error:
        log.info("reading %s: %s", disk.name, error)
        return False
    return True


def first_that_answers(disks: Mapping[Target, Path]) -> Target | None:
    """The parent whose disk answers a read first; None if no disk does. All are asked side by side."""
    pool = ThreadPoolExecutor(max(1, len(disks)), thread_name_prefix="probing-parents")
    try:
        probes = {pool.submit(answers, disk, PROBE_LIMIT): target for target, disk in disks.items()}
        return next((probes[probe] for probe in as_completed(probes) if probe.result()), None)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # probes that still wait end after PROBE_LIMIT


def _runs(disk: Path) -> bool:
    return word(f"{disk}/device/state") == "running"
