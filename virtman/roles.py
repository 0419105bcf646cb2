"""What a caller of the agent may do, by the user that the kernel names.

*Administrators*, root and the agent's own user, may do everything. *Operators* are all others whom the permissions of
the socket let in (``virtman agent --group``): they may do what a cloud needs of the host, and nothing that is not
written down here. A VM that ``virtman boot`` made is an administrator's: operators may read its disk, but not change
it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from virtman import calls
from virtman.errors import Forbidden

if TYPE_CHECKING:
    from pathlib import Path

    from virtman.peer import Peer
    from virtman.records import VmRecord

FOR_ALL = frozenset({("GET", "/openapi.json")})
"""Calls, by method and rule, that tell nothing of this host."""

FOR_OPERATORS = frozenset((call.method, call.path) for call in calls.ALL if call.members)
"""Calls, by method and rule, that operators may make, besides those that are for all."""

ALLOWED = (
    "may create, copy, send and destroy disks of VMs, publish, list and deploy images, and have devices read through"
    " the cache"
)

Permit = Callable[["VmRecord"], None]
"""Called with the VM that is to change, under the lock of the VM. Raises Forbidden."""


def check_call(peer: Peer | None, method: str, rule: str) -> None:
    """Check that the caller may make such a call; an unknown caller may make none. Raises Forbidden."""
    method = "GET" if method == "HEAD" else method  # which is answered as GET is
    if (method, rule) in FOR_ALL or (peer is not None and peer.administers):
        return
    if peer is None:
        raise Forbidden("nobody knows who calls: the agent is called by its unix socket")
    if (method, rule) not in FOR_OPERATORS:
        raise Forbidden(f"{peer} may not do this ({method} {rule}), only root: members of the agent's group {ALLOWED}")


def check_named(peer: Peer, file: Path) -> None:
    """Whether the agent may open, with its own rights, a file that the caller names. Raises Forbidden."""
    if not peer.administers:
        raise Forbidden(
            f"{peer} may not have the agent open {file}, only root: members of its group open files themselves and pass"
            " them, as virtman does"
        )


def anything(_record: VmRecord) -> None:
    """What the agent itself and administrators may change."""


def permit_of(peer: Peer) -> Permit:
    """Which VMs the caller may change."""
    return anything if peer.administers else partial(_refuse_booted, peer)


def _refuse_booted(peer: Peer, record: VmRecord) -> None:
    """Raises Forbidden for a VM that has a machine."""
    if record.boot is not None:
        raise Forbidden(
            f"{peer} may not change vm {record.name!r}, which 'virtman boot' made, only root: members of the"
            " agent's group may change disks that no such VM uses"
        )
