"""Who owns the kernel's names: those of maps, targets, loop devices and sessions are the whole machine's.

One process at a time, an agent or a test, works on them, and holds a lock. Each state folder has an owner's number,
which is made once and is in the UUID of each map. So an agent with another folder, or whose folder was lost, neither
uses nor removes what it did not make (see devmapper). Targets and sessions have the owner of their image's maps.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import uuid
from pathlib import Path

from drivers.errors import BadDisk, DriverError
from drivers.host.durable import write_atomically
from drivers.kernel import devmapper, udevrules

LOCK = Path("/run/virtman-kernel/lock")
"""Locked while a process works on the machine's names. The file names that process."""

_OWNER = re.compile(r"[0-9a-f]{16}")
_guard = threading.Lock()
_held: list[int] = []
"""The open lock, if this process has it. It goes with the process."""


def claim(state: Path) -> None:
    """Work on the machine's names for the owner of a state folder, from now on until the process ends.

    A process works for the first folder that it claims. Raises DriverError, BadDisk if the folder's number is damaged,
    CommandFailed, OSError.
    """
    with _guard:
        if _held:
            return
        _held.append(_locked(f"the agent with the state folder {state} (process {os.getpid()})"))
        try:
            owner = owner_of(state)
            devmapper.OWNERS.mkdir(exist_ok=True)
            (devmapper.OWNERS / owner).write_text(f"{state}\n")
            devmapper.act_for(owner)
            udevrules.leave_alone(state)
        except BaseException:
            os.close(_held.pop())
            raise


def owner_of(state: Path) -> str:
    """The number of a state folder, made now if it has none. Raises BadDisk, OSError."""
    file = state / "owner"
    try:
        found = file.read_text().strip()
    except FileNotFoundError:
        state.mkdir(parents=True, exist_ok=True)
        found = uuid.uuid4().hex[:16]
        write_atomically(file, f"{found}\n".encode())
    if not _OWNER.fullmatch(found):
        raise BadDisk(f"{file} is damaged; it has the 16 digits behind VIRTMAN- in the UUIDs of this host's maps")
    return found


def _locked(holder: str) -> int:
    """The open lock. Raises DriverError."""
    LOCK.parent.mkdir(exist_ok=True)
    fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, holder.encode(), 0)
    except BlockingIOError:
        other = os.pread(fd, 4096, 0).decode(errors="replace")
        os.close(fd)
        raise DriverError(f"the kernel stack of this machine is in use by {other or 'another agent'}") from None
    return fd
