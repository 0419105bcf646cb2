"""The process at the other end of a unix socket, as the kernel names it (unix(7), SO_PEERCRED)."""

from __future__ import annotations

import os
import pwd
import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("iII")
"""The kernel's ``struct ucred``: process, user, group."""


@dataclass(frozen=True)
class Peer:
    """The process that connected, and its user and group at that moment."""

    pid: int
    uid: int
    gid: int

    @property
    def administers(self) -> bool:
        """Whether it is root's, or of the agent's own user, and so may do all that the agent can."""
        return self.uid in (0, os.geteuid())

    def __str__(self) -> str:
        try:
            return f"user {pwd.getpwuid(self.uid).pw_name}"
        except KeyError:
            return f"user {self.uid}"


def peer_of(sock: socket.socket) -> Peer:
    """The process that has connected to a socket. Raises OSError."""
    answer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(answer))
