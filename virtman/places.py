"""Where an agent keeps its things unless it is told otherwise, and where the command line looks for it.

Root's agent is the host's: /var/lib/virtman, /run/virtman, ``qemu:///system``. An ordinary user's keeps its things
where such programs do (XDG Base Directory Specification; systemd: file-hierarchy(7)):

- state in ``$XDG_STATE_HOME/virtman``, else ``~/.local/state/virtman``;
- sockets in ``$XDG_RUNTIME_DIR/virtman``, else ``/run/user/UID/virtman`` if that user's folder is there (a session that
  began by su or cron has no variable), else ``/tmp/virtman-UID``, which has to be that user's own;
- VMs at ``qemu:///session``.

The specification has relative paths in its variables ignored.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from drivers.names import STATE

NBD = 10809
"""The TCP port that is registered for NBD (IANA)."""

SOCKET = "agent.sock"
"""The socket of the local API in the run folder."""


@dataclass(frozen=True)
class Places:
    """``state`` survives a reboot, ``run`` has the sockets, ``libvirt`` runs the VMs. ``port``: see ``Place``."""

    state: Path
    run: Path
    libvirt: str
    port: int = 0

    @property
    def socket(self) -> Path:
        return self.run / SOCKET


SYSTEM = Places(STATE, Path("/run/virtman"), "qemu:///system", NBD)


def places() -> Places:
    """The places of the user that runs this program."""
    return places_of(os.geteuid(), os.environ, Path("/run/user"))


def join_session() -> None:
    """Have what this program uses, libvirt and virsh, find the user's session where su or cron did not name it."""
    join_session_of(os.geteuid(), os.environ, Path("/run/user"))


def join_session_of(uid: int, environment: MutableMapping[str, str], sessions: Path) -> None:
    """Name a user's session in ``environment``, unless it has a name or is not there. Root has none."""
    if uid != 0 and not _absolute(environment.get("XDG_RUNTIME_DIR")) and os.access(sessions / str(uid), os.W_OK):
        environment["XDG_RUNTIME_DIR"] = str(sessions / str(uid))


def places_of(uid: int, environment: Mapping[str, str], sessions: Path) -> Places:
    """The places of a user; ``sessions`` has a folder for each that is logged in."""
    if uid == 0:
        return SYSTEM
    joined = dict(environment)
    join_session_of(uid, joined, sessions)
    home = _absolute(environment.get("HOME")) or Path.home()
    state = _absolute(environment.get("XDG_STATE_HOME")) or home / ".local" / "state"
    run = _absolute(joined.get("XDG_RUNTIME_DIR"))
    return Places(state / "virtman", run / "virtman" if run else Path(f"/tmp/virtman-{uid}"), "qemu:///session")  # noqa: S108


def is_ours(folder: Path) -> bool:
    """Whether the folder is there and this user's own, so that nobody else can have put a socket into it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _absolute(value: str | None) -> Path | None:
    return Path(value) if value and Path(value).is_absolute() else None
