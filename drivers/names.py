"""Names at the door: what drivers build file names, socket names and node names from."""

from __future__ import annotations

import re
from pathlib import Path

from drivers.errors import BadName, DriverError

STATE = Path("/var/lib/virtman")
"""Where an agent has its files, unless it is told otherwise."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", re.ASCII)

SOCKET_PATH_LIMIT = 107
"""Bytes of a unix socket's path: sun_path has 108 with its ending zero (unix(7))."""


def checked(name: str) -> str:
    """The name itself, if it is one. Raises BadName."""
    if not is_name(name):
        raise BadName(name)
    return name


def is_name(name: str) -> bool:
    """Whether it is one."""
    return _NAME.fullmatch(name) is not None


def fitting(path: Path) -> Path:
    """The socket path itself, if an address can hold it. Raises DriverError."""
    if len(bytes(path)) > SOCKET_PATH_LIMIT:
        raise DriverError(
            f"the socket path {path} is longer than {SOCKET_PATH_LIMIT} bytes: choose a shorter run folder"
        )
    return path
