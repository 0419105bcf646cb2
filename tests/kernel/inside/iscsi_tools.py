"""What tests of iSCSI in one guest need: who logs in, raw commands, and a list of what is there."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from testtools import TestCase

from drivers.errors import CommandFailed
from drivers.export.lio import LioExport
from drivers.host.command import run
from drivers.iscsi.names import CHAP_USER, Side, password
from tests.kernel.inside import sgio

SECRET = "of this edge"

RTSLIB_WARNS = pytest.mark.filterwarnings(
    # rtslib 2.1.75 leaves its lock file open, and calls what pyudev 0.24 no longer recommends.
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:Will be removed in 1.0:DeprecationWarning",
)
"""The mark of tests in which rtslib is used."""

CHECK_CONDITION = 0x02
DATA_PROTECT = 0x07
"""SCSI: SPC-4, table of status codes, table of sense keys."""

_LISTINGS = (
    ["dmsetup", "ls"],
    ["losetup", "--list"],
    ["iscsiadm", "--mode", "session"],
    ["iscsiadm", "--mode", "node"],
    ["find", "/sys/kernel/config/target", "-mindepth", "2", "-maxdepth", "4", "-type", "d"],
    ["ls", "/sys/block", "--ignore=loop*"],  # unused loop devices stay
)


def what_is_there() -> list[list[str]]:
    """Lines of each listing of what a kernel stack makes."""
    run(["udevadm", "settle"])
    return [_listing(argv) for argv in _LISTINGS]


def expect_nothing_left(test: TestCase, export: LioExport) -> None:
    """Have the test fail if at its end more is there than now."""
    export.reserve("warm-up")  # makes the folders of the iSCSI fabric, which stay
    export.withdraw("warm-up")
    before = what_is_there()
    test.addCleanup(lambda: test.assertEqual(before, what_is_there()))


def _listing(argv: list[str]) -> list[str]:
    try:
        return sorted(run(argv).stdout.splitlines())
    except CommandFailed as error:
        if "No records found" in error.stderr or "No active sessions" in error.stderr:
            return []
        raise


def log_in(target: str, portal: str, secret: str = SECRET) -> None:
    """Log in as the guest itself. Raises CommandFailed."""
    record = ["iscsiadm", "--mode", "node", "--targetname", target, "--portal", portal]
    run([*record, "--op", "new"])
    settings = {
        "authmethod": "CHAP",
        "username": CHAP_USER,
        "password": password(secret, Side.CHILD),
        "username_in": CHAP_USER,
        "password_in": password(secret, Side.PARENT),
    }
    for name, value in settings.items():
        run([*record, "--op", "update", "--name", f"node.session.auth.{name}", "--value", value])
    run([*record, "--login"])


def log_out(target: str, portal: str) -> None:
    """End the session, if there is one, and forget the target."""
    record = ["iscsiadm", "--mode", "node", "--targetname", target, "--portal", portal]
    for last in (["--logout"], ["--op", "delete"]):
        try:
            run([*record, *last])
        except CommandFailed as error:
            if "No matching sessions" not in error.stderr and "No records found" not in error.stderr:
                raise


@contextlib.contextmanager
def it_may_go() -> Iterator[None]:
    """What is asked for may go meanwhile: before its file is opened, or after."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise


def disks_of(target: str) -> list[Path]:
    """The nodes of the disks with LUN 0 that this guest has from a target."""
    run(["udevadm", "settle"])
    for session in Path("/sys/class/iscsi_session").glob("*"):
        with it_may_go():
            if (session / "targetname").read_text().strip() == target:
                return [Path("/dev") / found.name for found in session.glob("device/target*/*:0/block/*")]
    return []


def write_first_sector(disk: Path) -> sgio.Answer:
    """Send a WRITE(10) past the initiator's own idea of a read-only disk."""
    return sgio.send(disk, bytes([0x2A, 0, 0, 0, 0, 0, 0, 0, 1, 0]), b"\xff" * 512)


def reserve(disk: Path) -> sgio.Answer:
    """Ask for the disk for oneself alone, as hosts did before there were keys: RESERVE(6) of SPC-2."""
    return sgio.send(disk, bytes([0x16, 0, 0, 0, 0, 0]))


def register(disk: Path) -> sgio.Answer:
    """Begin to reserve the disk by a key: PERSISTENT RESERVE OUT, REGISTER (SPC-4, 6.16)."""
    return sgio.send(disk, bytes([0x5F, 0, 0, 0, 0, 0, 0, 0, 24, 0]), bytes(8) + b"\1" * 8 + bytes(8))
