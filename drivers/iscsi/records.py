"""What open-iscsi knows of parents: a record for each target, from which it logs in.

They are written here and not by iscsiadm, which takes secrets only where every user of the host can read them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drivers.host.folders import matching
from drivers.iscsi.names import CHAP_USER, PORTAL_GROUP, Side, password

TIMES = {
    # The agent leaves a parent much sooner, if another one answers. Without an agent the kernel does, interval and
    # timeout after its last sign, whether another one is better or not: so not for a network that pauses.
    # From a login on replacement_timeout is 0, see fail_fast.
    "node.session.timeo.replacement_timeout": 1,
    "node.conn[0].timeo.noop_out_interval": 5,
    "node.conn[0].timeo.noop_out_timeout": 25,
    "node.conn[0].timeo.login_timeout": 5,
    "node.conn[0].timeo.logout_timeout": 2,
}
"""Seconds, as a parent's record has them (iscsid.conf)."""

_DATABASES = (Path("/var/lib/iscsi"), Path("/etc/iscsi"))
"""Where open-iscsi may keep what it knows. Debian's package makes the first since 13, others' always have."""


@dataclass(frozen=True)
class Target:
    """Where a parent serves an image. ``secret`` is the edge's, where it is known."""

    name: str
    ip: str
    port: int
    secret: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        return self.portal

    @property
    def portal(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"

    @property
    def record(self) -> Path:
        """Where open-iscsi has what it knows of the target."""
        return folder() / self.name / f"{self.ip},{self.port},{PORTAL_GROUP}" / "default"


def folder(databases: Sequence[Path] = _DATABASES) -> Path:
    """Where this machine's open-iscsi looks for records."""
    return next((each for each in databases if each.is_dir()), databases[-1]) / "nodes"


def write(target: Target, initiator: str) -> None:
    """Write the record by which the initiator of this name logs in. Raises OSError."""
    target.record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(target.record, "w", opener=_private) as file:
        file.write(_text(target, initiator))


def recorded_as(target: Target, initiator: str) -> bool:
    """Whether the record is what would be written now: with the same secret, for one. Raises OSError."""
    try:
        return target.record.read_text() == _text(target, initiator)
    except FileNotFoundError:
        return False


def remove(target: Target) -> None:
    """Forget a target. Raises OSError."""
    target.record.unlink(missing_ok=True)
    for each in (target.record.parent, target.record.parent.parent):
        with contextlib.suppress(OSError):  # there is none, or another parent's record is in it
            each.rmdir()


def recorded() -> set[Target]:
    """The targets with a record."""
    found = set()
    for portal in matching(folder(), "*", f"*,*,{PORTAL_GROUP}"):
        ip, port, _group = portal.name.split(",")
        found.add(Target(portal.parent.name, ip, int(port)))
    return found


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _text(target: Target, initiator: str) -> str:
    return "".join(f"{name} = {value}\n" for name, value in _record(target, initiator).items())


def _record(target: Target, initiator: str) -> dict[str, object]:
    """What open-iscsi does not take from its defaults (open-iscsi: usr/idbm_fields.h)."""
    return {
        "node.name": target.name,
        "node.tpgt": PORTAL_GROUP,
        "node.startup": "manual",
        "iface.iscsi_ifacename": "default",
        "iface.transport_name": "tcp",
        "iface.initiatorname": initiator,
        "node.discovery_type": "static",
        "node.conn[0].address": target.ip,
        "node.conn[0].port": target.port,
        "node.session.scan": "manual",  # only the one disk is looked for
        "node.session.initial_login_retry_max": 0,  # the retries are here
        **TIMES,
        # Seconds that a session rests before it connects anew, if the parent says no more (RFC 7143, 13.15).
        "node.session.iscsi.DefaultTime2Wait": 0,
        "node.conn[0].iscsi.HeaderDigest": "CRC32C",  # TCP's sum of 16 bits lets one of 65536 damaged segments pass
        "node.conn[0].iscsi.DataDigest": "CRC32C",
        "node.session.auth.authmethod": "CHAP",
        "node.session.auth.username": CHAP_USER,
        "node.session.auth.password": password(target.secret, Side.CHILD),
        "node.session.auth.username_in": CHAP_USER,
        "node.session.auth.password_in": password(target.secret, Side.PARENT),
    }
