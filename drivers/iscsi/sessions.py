"""Sessions with parents: sysfs tells which exist, iscsiadm(8) begins and ends them.

open-iscsi logs in again by itself to a parent whose connection ended, until the session is ended.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from drivers.errors import CommandFailed, DriverError, NotReleased
from drivers.host import retry
from drivers.host.command import run
from drivers.host.folders import matching
from drivers.iscsi import records
from drivers.iscsi.names import DISK, image_of
from drivers.iscsi.records import Target

log = logging.getLogger(__name__)

REFUSED = "it refuses this host: Volt has not named it yet, or with another secret"
REFUSALS = {19: "it does not prove itself by the secret that Volt gave", 24: REFUSED}
"""What the exit codes of iscsiadm mean by which a parent refuses a login."""

_NO_SESSION, _IN_LOGIN, _SESSION_EXISTS, _NO_RECORDS = 2, 9, 15, 21
_LOGIN_LIMIT, _LOGOUT_LIMIT = 30.0, 30.0
_CLASS = "/sys/class/iscsi_session"
_LOCKS = Path("/run/lock/iscsi")
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_UNTOLD = "(null)"
"""What the kernel shows of a new session that has no target name, or no address, yet."""


@dataclass(frozen=True)
class Session:
    """A session as sysfs shows it in ``folder`` (Linux: drivers/scsi/scsi_transport_iscsi.c)."""

    folder: str
    target: Target
    logged_in: bool

    def disk(self) -> Path | None:
        """The folder of the image's disk. Raises OSError."""
        return next(matching(Path(self.folder, "device"), "target*", f"*:{DISK}", "block", "*"), None)

    def fail_fast(self) -> None:
        """Have requests come back once the connection is gone, for the map to send them elsewhere. Raises OSError.

        The record cannot say it: open-iscsi makes 120 s of 0.
        """
        Path(self.folder, "recovery_tmo").write_text("0")

    def scan(self) -> None:
        """Look for the image's disk. Raises OSError."""
        host = Path(self.folder, "device").resolve().parent.name
        Path(f"/sys/class/scsi_host/{host}/scan").write_text(f"0 0 {DISK}")

    def cut(self) -> None:
        """End the TCP connection: requests come back at once, and open-iscsi logs in again.

        Raises DriverError, OSError, also without a connection.
        """
        port = word(f"{_connection(self.folder)}/local_port")
        run(["ss", "--kill", "--tcp", "--numeric", "state", "established",
             "dst", self.target.portal, "sport", "=", f":{port}"])  # fmt: skip


@contextlib.contextmanager
def may_go(*also: type[Exception]) -> Iterator[None]:
    """Take what cannot be read within it for gone: it may be coming or going.

    Raises OSError where this process has no room to look: that tells nothing of what it looks at.
    """
    try:
        yield
    except also:
        return
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise


def sessions(image: str | None = None) -> dict[Target, Session]:
    """All sessions of this host, or those with an image's parents. Raises OSError."""
    found = {}
    for folder in _folders():
        with may_go(ValueError):
            target = _target(folder)
            if image is None or image_of(target.name) == image:
                found[target] = Session(folder, target, word(f"{folder}/state") == "LOGGED_IN")
    return found


_targets: dict[str, Target] = {}
"""The parents of sessions, by the sessions' folders: they do not change, and are looked at often."""


def _folders() -> list[str]:
    """The folders of all sessions; none before the kernel's module is loaded. Raises OSError."""
    there = [str(folder) for folder in matching(Path(_CLASS), "session*")]
    for gone in _targets.keys() - set(there):
        _targets.pop(gone, None)
    return there


def _target(folder: str) -> Target:
    """The parent of a session. Raises OSError, ValueError: iscsid has not told the kernel yet."""
    known = _targets.get(folder)
    if known is None:
        name, connection = word(f"{folder}/targetname"), _connection(folder)
        address = word(f"{connection}/persistent_address")
        if _UNTOLD in (name, address):
            raise ValueError(folder)
        known = _targets[folder] = Target(name, address, int(word(f"{connection}/persistent_port")))
    return known


def _connection(folder: str) -> Path:
    """The folder of a session's connection. Raises OSError."""
    found = next(matching(Path(folder), "device", "connection*", "iscsi_connection", "*"), None)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "the session has no connection", folder)
    return found


def known_targets() -> set[Target]:
    """The parents that this host has a session with or a record of. Raises OSError."""
    return set(sessions()) | records.recorded()


def log_in(target: Target, initiator: str) -> None:
    """Write the parent's record and log in by it. Raises DriverError, OSError."""
    records.write(target, initiator)
    _run(["iscsiadm", "--mode", "node", "--targetname", target.name, "--portal", target.portal, "--login"],
         _SESSION_EXISTS)  # fmt: skip


def log_out(target: Target) -> None:
    """End the session with a parent, if there is one, and then remove the parent's record.

    Wait for a session that is being made: without a record it would never be found. Raises DriverError, OSError.
    """
    if not retry.until(partial(_has_ended, target), limit=_LOGOUT_LIMIT):
        if target in sessions():
            raise NotReleased(f"session with {target.portal}", _LOGOUT_LIMIT)
        log.warning("a session is neither made nor gone after %g s: was iscsid killed?", _LOGOUT_LIMIT)
    records.remove(target)


def _has_ended(target: Target) -> bool:
    """Whether there is no session with a parent; else try to end it. Raises DriverError, OSError."""
    # Before the next look: what this one takes for half made may be whole then.
    half_made = any(_is_half_made(folder, target.name) for folder in _folders())
    session = sessions(image_of(target.name)).get(target)
    if session is None:
        return not half_made
    with contextlib.suppress(DriverError, OSError):  # there may be no connection
        session.cut()  # a session ends when its requests have ended, and the parent may hang
    argv = ["iscsiadm", "--mode", "session", "--sid", session.folder.removeprefix(f"{_CLASS}/session"), "--logout"]
    _run(argv, _NO_SESSION, _IN_LOGIN, _NO_RECORDS)  # iscsid may not know the session yet, or no more
    return False


def _is_half_made(folder: str, name: str) -> bool:
    """Whether a session comes or goes that is, or may be, with the target of this name."""
    try:
        found = word(f"{folder}/targetname")
        if found == name:
            _target(folder)
    except (OSError, ValueError):
        return Path(folder).exists()
    return found == _UNTOLD


def _run(argv: Sequence[str], *harmless: int) -> None:
    """Run an iscsiadm that may end with one of these codes as well. Raises DriverError."""
    _LOCKS.mkdir(parents=True, exist_ok=True)  # iscsiadm does not make it
    try:
        run(argv, timeout=_LOGIN_LIMIT)
    except CommandFailed as error:
        if error.code not in harmless:
            raise


def word(path: Path | str) -> str:
    """What a file of sysfs says. Raises OSError."""
    return Path(path).read_text().strip()
