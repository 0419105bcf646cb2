"""Sessions with parents: sysfs tells which there are, iscsiadm(8) begins and ends them."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from drivers.errors import CommandFailed, NotReleased
from drivers.host.command import run
from drivers.host.folders import matching
from drivers.iscsi import records
from drivers.iscsi.names import DISK, image_of
from drivers.iscsi.records import Target
from drivers.kernel import tcpsockets
from drivers.kernel.tcpsockets import Link

log = logging.getLogger(__name__)

UNPROVEN = 19
"""The exit code of iscsiadm where a parent does not prove itself."""

REFUSALS = {
    UNPROVEN: "it does not prove itself by the secret that Volt gave",
    24: "it refuses this host: Volt has not named it yet, or with another secret",
}
"""What the exit codes of iscsiadm mean by which a parent refuses a login."""

_NO_SESSION, _IN_LOGIN, _SESSION_EXISTS, _NO_RECORDS = 2, 9, 15, 21
_LOGIN_LIMIT = 30.0
_LOGOUT_LIMIT = 30.0
_LOGOUT_PAUSE = 0.02
_NUDGE_LIMIT = 1.0
ISCSID = "\0ISCSIADM_ABSTRACT_NAMESPACE"
"""The address at which iscsid takes requests (open-iscsi: etc/systemd/iscsid.socket)."""
CLASS = Path("/sys/class/iscsi_session")
_LOCKS = Path("/run/lock/iscsi")
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@dataclass(frozen=True)
class Session:
    """A session as sysfs shows it (Linux: drivers/scsi/scsi_transport_iscsi.c)."""

    number: int
    target: Target
    logged_in: bool
    device: Path

    def disk(self) -> Path | None:
        """The folder of the image's disk. Raises OSError."""
        return _kept(_disks, str(self.device), self._find_disk)

    def _find_disk(self) -> Path | None:
        return next(matching(self.device, "target*", f"*:{DISK}", "block", "*"), None)

    def fail_fast(self) -> None:
        """Have requests come back once the connection is gone, for the map to send them elsewhere. Raises OSError.

        The record cannot say it: open-iscsi makes 120 s of 0.
        """
        Path(f"{CLASS}/session{self.number}/recovery_tmo").write_text("0")

    def cut(self) -> None:
        """End its connection: what the parent has not answered comes back now. open-iscsi makes a new one.

        Raises OSError, also if there is none.
        """
        link = link_to(self.target)
        if link is None:
            raise FileNotFoundError(errno.ENOENT, "the session has no connection", str(self.device))
        tcpsockets.end(link)

    def scan(self) -> None:
        """Look for the image's disk. Raises OSError."""
        host = self.device.resolve().parent.name
        Path(f"/sys/class/scsi_host/{host}/scan").write_text(f"0 0 {DISK}")


_names: dict[str, str] = {}
"""The targets' names of this host's sessions, by their folders: no session has the number of an earlier one, until the
module is loaded anew (Linux: drivers/scsi/scsi_transport_iscsi.c, iscsi_session_nr)."""
_connections: dict[str, Path] = {}
_ends: dict[str, Target] = {}
"""The folders of their connections, and whom they are with, which do not change either."""
_disks: dict[str, Path] = {}
"""The folders of their disks. One that is found anew has another."""

_UNTOLD = "(null)"
"""What the kernel shows of a new session that iscsid has not told it yet: its target's name and address."""


@contextlib.contextmanager
def may_go(*also: type[Exception]) -> Iterator[None]:
    """What cannot be read in it may be coming or going, and is not there then.

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
            name = name_of(folder)
            if image is None or image_of(name) == image:
                session = _session(folder, name)
                found[session.target] = session
    return found


def name_of(folder: str) -> str:
    """The target's name of a session, given by its folder; "" while it has none yet. Raises OSError."""
    name = _names.get(folder) or word(f"{folder}/targetname")
    return "" if name == _UNTOLD else _names.setdefault(folder, name)


def forget(folder: str) -> None:
    """A session has gone, given by its folder."""
    for known in (_names, _connections, _ends):
        known.pop(folder, None)
    _disks.pop(f"{folder}/device", None)


def _folders() -> list[str]:
    """Those of all sessions. What is known of others is forgotten. Raises OSError."""
    try:
        with os.scandir(CLASS) as entries:
            there = [entry.path for entry in entries]
    except FileNotFoundError:  # before the module is
        there = []
    for gone in _names.keys() - set(there):
        forget(gone)
    return there


def _session(folder: str, name: str) -> Session:
    """Raises OSError, ValueError: it has no connection yet, or none any more."""
    connection = _kept(_connections, folder, partial(_find_connection, folder))
    if connection is None:
        raise ValueError(folder)
    target = _ends.get(folder) or _ends.setdefault(folder, _target_of(connection, name))
    number = int(folder.removeprefix(f"{CLASS}/session"))
    return Session(number, target, word(f"{folder}/state") == "LOGGED_IN", Path(f"{folder}/device"))


def _find_connection(folder: str) -> Path | None:
    return next(matching(Path(folder), "device", "connection*", "iscsi_connection", "*"), None)


def _target_of(connection: Path, name: str) -> Target:
    """Raises OSError, ValueError: iscsid has not told it yet."""
    address = word(f"{connection}/persistent_address")
    if address == _UNTOLD:
        raise ValueError(address)
    return Target(name, address, int(word(f"{connection}/persistent_port")))


def _kept(known: dict[str, Path], folder: str, find: Callable[[], Path | None]) -> Path | None:
    """What was found for a folder, as long as it is there: to look for it costs ten times as much as to ask for that.

    Raises OSError.
    """
    found = known.get(folder)
    if found is None or not os.path.exists(found):  # noqa: PTH110  (a method of Path costs more than the call)
        known.pop(folder, None)
        if (found := find()) is not None:
            known[folder] = found
    return found


def link_to(target: Target) -> Link | None:
    """The connection of a session that ``sessions`` has told of; None if it has none. Raises OSError."""
    for folder in [folder for folder, end in _ends.copy().items() if end == target]:
        with contextlib.suppress(FileNotFoundError, KeyError):  # it has gone, and another one is there
            return Link(target.ip, target.port, int(word(f"{_connections[folder]}/local_port")))
    return None


def known_targets() -> set[Target]:
    """What this host has a session with or a record of."""
    return set(sessions()) | records.recorded()


def log_in(target: Target, initiator: str) -> None:
    """Write the parent's record and log in by it. Raises DriverError, OSError."""
    records.write(target, initiator)
    _told(["iscsiadm", "--mode", "node", "--targetname", target.name, "--portal", target.portal, "--login"],
          _SESSION_EXISTS)  # fmt: skip


def nudge(address: str = ISCSID) -> None:
    """Have iscsid do what is due, by a connection to it that ends without a request. It is not awaited for long.

    A new connection that is not there within a millisecond it looks at again when the second of the monotonic clock has
    turned: with the next event, which may be an alarm a second later that other events put off (open-iscsi:
    usr/initiator.c, session_conn_poll; usr/actor.c, actor_poll; usr/event_poll.c, event_loop). Where iscsiadm finds it,
    and systemd starts it for whoever comes, etc/systemd/iscsid.socket says; a request of iscsiadm would do as well, but
    takes a process.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(_NUDGE_LIMIT)
        try:
            asking.connect(address)
        except OSError as error:  # what is due it does some time
            log.debug("asking iscsid to do what is due: %s", error)
        else:
            log.debug("asked iscsid to do what is due")


def log_out(target: Target) -> None:
    """End the session, if there is one, and remove the record once it is gone. Raises DriverError, OSError.

    One that is just being made is waited for: without a record nobody would look for it.
    """
    end, pause = time.monotonic() + _LOGOUT_LIMIT, _LOGOUT_PAUSE
    while True:
        changing = _changing(target.name)  # before the next look: what it takes for half made may be whole then
        session = sessions(image_of(target.name)).get(target)
        if session is None and not changing:
            break
        late = time.monotonic() > end
        if session is not None:
            if late:
                raise NotReleased(f"session with {target.portal}", _LOGOUT_LIMIT)
            argv = ["iscsiadm", "--mode", "session", "--sid", str(session.number), "--logout"]
            _told(argv, _NO_SESSION, _IN_LOGIN, _NO_RECORDS)  # iscsid may not know it yet, or no more
        elif late:
            log.warning("%d sessions are neither made nor gone after %g s", len(changing), _LOGOUT_LIMIT)
            _stuck.update(changing)
            break
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    records.remove(target)


_stuck: set[str] = set()
"""Sessions that nobody makes whole any more: iscsid was killed over them. They are waited for once."""


def _changing(name: str) -> list[str]:
    """The sessions that come or go and are, or may be, with the target of this name."""
    there = _folders()
    _stuck.intersection_update(there)
    return [folder for folder in there if folder not in _stuck and _is_half_made(folder, name)]


def _is_half_made(folder: str, name: str) -> bool:
    try:
        found = name_of(folder)
        if found == name:
            _session(folder, found)
    except (OSError, ValueError):
        return Path(folder).exists()
    return not found


def _told(argv: Sequence[str], *harmless: int) -> None:
    """Run an iscsiadm that may end with one of these codes as well. Raises DriverError."""
    _LOCKS.mkdir(parents=True, exist_ok=True)  # iscsiadm does not make it
    try:
        run(argv, timeout=_LOGIN_LIMIT)
    except CommandFailed as error:
        if error.code not in harmless:
            raise


def word(path: Path | str) -> str:
    """What a file of sysfs says, at most a page. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, mmap.PAGESIZE).decode().strip()
    finally:
        os.close(fd)
