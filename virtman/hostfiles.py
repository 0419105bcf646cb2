"""The agent's own files: what the operating system says of them becomes one of the agent's errors here.

So whoever undoes what failed catches VirtmanError and DriverError, and nothing escapes it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from virtman.errors import HostTrouble, NoRoom

RESERVE = 64 << 20
"""Bytes that are kept free where the agent keeps images and VMs' disks, which stop when there is no room."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a full file system, or a used up quota, answers."""


@contextmanager
def told(doing: str) -> Iterator[None]:
    """Raise NoRoom or HostTrouble instead of an OSError. ``doing``: what was tried, with the path."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise NoRoom(f"no space left for {doing}; make room there") from error
        raise HostTrouble(f"{doing}: {error.strerror or error}") from error
