"""What open-iscsi knows of parents: a record for each target, from which it logs in.

They are written here and not by iscsiadm, which takes secrets only where every user of the host can read them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from drivers.host.folders import matching
from drivers.iscsi.names import CHAP_USER, PORTAL_GROUP, Side, password

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
    with open(target.record, "w", opener=partial(os.open, mode=0o600)) as file:
        file.write(_text(target, initiator))


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


def _text(target: Target, initiator: str) -> str:
    """What open-iscsi does not take from its defaults (open-iscsi: usr/idbm_fields.h). Times in seconds."""
    fields = {
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
        "node.session.initial_login_retry_max": 0,  # the driver tries again
        "node.session.timeo.replacement_timeout": 1,  # from a login on 0, see Session.fail_fast
        # The kernel ends a connection interval and timeout after the last answer, and open-iscsi tries a new one every
        # few seconds: after a longer pause of the network TCP alone would wait for as long again.
        "node.conn[0].timeo.noop_out_interval": 5,
        "node.conn[0].timeo.noop_out_timeout": 5,
        "node.conn[0].timeo.login_timeout": 5,
        "node.conn[0].timeo.logout_timeout": 2,
        # From the end of a connection, or a refusal, until the next login (RFC 7143, 13.15): 2 by default. With 0
        # open-iscsi tries some hundred times a second.
        "node.session.iscsi.DefaultTime2Wait": 1,
        "node.conn[0].iscsi.HeaderDigest": "CRC32C",  # TCP's sum of 16 bits lets one of 65536 damaged segments pass
        "node.conn[0].iscsi.DataDigest": "CRC32C",
        "node.session.auth.authmethod": "CHAP",
        "node.session.auth.username": CHAP_USER,
        "node.session.auth.password": password(target.secret, Side.CHILD),
        "node.session.auth.username_in": CHAP_USER,
        "node.session.auth.password_in": password(target.secret, Side.PARENT),
    }
    return "".join(f"{name} = {value}\n" for name, value in fields.items())
