"""Names that OpenNebula's things have in VirtMan, and the places of a VM's disk.

A name of VirtMan has at most 63 letters, digits, ``-`` and ``_``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from opennebula_tm.driver.errors import Refused

LONGEST = 63
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
VM_FOLDER = re.compile(r"(/[^\x00-\x1f\x7f:]+)?/(\d{1,10})/(\d{1,10})")
"""Of a system datastore: ``…/DATASTORE/VM``."""
OURS = ".virtman"
"""The folder in a system datastore, beside those of the VMs, that has what must outlive these: ``mv`` of OpenNebula's
ssh driver removes a VM's folder at its destination.
"""


def check_host(host: str) -> str:
    """The host, if ssh can be given it. Raises Refused."""
    if not HOST.fullmatch(host):
        raise Refused(f"the host name {host!r} has something else than letters, digits, dots, '-' and '_'")
    return host


def disk(vm: int, number: int, host: str) -> str:
    """The name of a VM's disk on a host.

    The host is part of it, so that the link to a disk leads nowhere on any other host: a migration that took the link
    for the disk fails, instead of opening what has the same name there.
    """
    begin = f"one-{vm}-{number}-"
    # A host name has no "_" (RFC 1123), so no two hosts get one name.
    name = begin + host.replace(".", "_")
    if len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(host.encode()).hexdigest()[:12]
    return f"{name[: LONGEST - len(digest) - 1]}-{digest}"


def snapshot(number: int) -> str:
    """The name of OpenNebula's snapshot of this number."""
    return f"snap-{number}"


@dataclass(frozen=True)
class Place:
    """``host:path``: a VM's folder in a system datastore, or a file in it."""

    host: str
    path: PurePosixPath

    def __str__(self) -> str:
        """As OpenNebula writes it."""
        return f"{self.host}:{self.path}"

    @property
    def disk(self) -> int | None:
        """The number of the disk that is there, if it is one."""
        found = re.fullmatch(r"disk\.(\d{1,5})", self.path.name)
        return int(found[1]) if found and VM_FOLDER.fullmatch(str(self.folder)) else None

    @property
    def folder(self) -> PurePosixPath:
        """The VM's folder."""
        return self.path if VM_FOLDER.fullmatch(str(self.path)) else self.path.parent

    @property
    def datastore(self) -> int:
        """The number of the system datastore."""
        return int(self.folder.parent.name)

    @property
    def ours(self) -> PurePosixPath:
        """The folder that is ours in the system datastore."""
        return self.folder.parent / OURS

    @property
    def locks(self) -> PurePosixPath:
        """The folder of the locks on the host, for all system datastores: a disk may go from one to another."""
        return self.folder.parent.parent / OURS


def place(argument: str) -> Place:
    """Read an argument of a script. Raises Refused."""
    host, colon, path = argument.partition(":")
    normal = PurePosixPath(re.sub("/+", "/", path))
    found = Place(host, normal)
    if not colon or ".." in normal.parts or not VM_FOLDER.fullmatch(str(found.folder)):
        raise Refused(f"{argument!r} is no place of a VM in a system datastore (host:…/DATASTORE/VM/disk.N)")
    check_host(host)
    return found


def path_of(argument: str) -> PurePosixPath:
    """The path of ``host:path``, or of a path without a host: destinations of MVDS and CPDS have none."""
    _, colon, path = argument.partition(":")
    return PurePosixPath(re.sub("/+", "/", path if colon else argument))


def number(what: str, text: str) -> int:
    """A number that OpenNebula gave. Raises Refused."""
    if not re.fullmatch(r"-1|\d{1,15}", text):
        raise Refused(f"{what} {text!r} is no number")
    return int(text)
