"""Connections to unix sockets."""

from __future__ import annotations

import socket
from pathlib import Path


def connected(path: Path) -> socket.socket:
    """A connection to whoever listens there. Raises OSError if nobody does."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(str(path))
    except BaseException:
        sock.close()
        raise
    return sock


def listens(path: Path) -> bool:
    """Whether somebody listens there."""
    try:
        connected(path).close()
    except OSError:
        return False
    return True
