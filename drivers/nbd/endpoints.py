"""Where hosts of one machine find each other's exports, and the block nodes by which a QEMU reads them.

An export is a unix socket ``<folder>/<image>.sock``; a host is reached at ``unix://<folder>``.
"""

from __future__ import annotations

from pathlib import Path

from drivers.base import BlockNode
from drivers.errors import BadAddress
from drivers.names import checked

CACHE_NODE = "cache"
"""A node of this name inside a device is exported a second time, read as it is, to tell what it holds."""

RECONNECT_DELAY = 86400
"""Seconds a client holds its requests while the server is away. A lost parent is not an error, so: long."""

OPEN_TIMEOUT = 30
"""Seconds a client keeps trying when it opens an endpoint where nobody listens."""

_SCHEME = "unix://"


def address_of(folder: Path) -> str:
    """How a host is reached whose sockets are in ``folder``."""
    return f"{_SCHEME}{folder}"


def folder_of(address: str) -> Path:
    """The folder of the sockets of a host that is reached at ``unix://<folder>``. Raises BadAddress."""
    folder = Path(address.removeprefix(_SCHEME))
    if not address.startswith(_SCHEME) or not folder.is_absolute():
        raise BadAddress(f"{address!r} is not an address of this driver: unix:// and an absolute path")
    return folder


def socket_of(address: str, image: str) -> Path:
    """The socket by which the host at an address serves an image. Raises BadAddress, BadName."""
    return folder_of(address) / f"{checked(image)}.sock"


def client_node(socket: Path, key: str, *, open_timeout: int = OPEN_TIMEOUT) -> BlockNode:
    """The node by which a QEMU reads an image at a socket and outlives restarts of who serves it there.

    It asks for the image by its ``key``: who serves other content under the same name refuses.
    """
    return {
        "driver": "nbd",
        "server": {"type": "unix", "path": str(socket)},
        "export": key,
        "reconnect-delay": RECONNECT_DELAY,
        "open-timeout": open_timeout,
    }


def cache_export(image: str) -> str:
    """The name of the second export, see CACHE_NODE; the dot keeps it apart from the names of images."""
    return f"{image}.cache"
