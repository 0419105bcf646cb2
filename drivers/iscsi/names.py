"""Names, addresses and secrets of iSCSI that a parent and its children work out alike, each for itself."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import re
import uuid
from enum import StrEnum
from urllib.parse import urlsplit

from drivers.base import Image
from drivers.errors import BadAddress
from drivers.names import checked

PORT = 3260
"""iscsi-target in IANA's list of ports."""

PORTAL_GROUP = 1
"""The tag of the one portal group of each target."""

DISK = 0
"""The number of the one logical unit of each target."""

SCHEME = "iscsi"
CHAP_USER = "virtman"
_AUTHORITY = "iqn.2026-01.org.virtman"
_LONGEST_NAME = 223  # RFC 3720, 3.2.6.1


class Side(StrEnum):
    """The host that a password authenticates: the two passwords of an edge have to differ (RFC 3720, 8.2.1)."""

    CHILD = "child"
    PARENT = "parent"


def password(secret: str, side: Side) -> str:
    """The CHAP password of one side of the edge that has this secret."""
    return hashlib.sha256(f"{side}:{secret}".encode()).hexdigest()


def target_name(host: str, image: str) -> str:
    """The iSCSI name of the target by which a host serves an image. Raises BadName, BadAddress if it is too long."""
    return _iscsi_name(host, image)


def initiator_name(host: str) -> str:
    """The iSCSI name by which a host logs in to its parents. Raises BadName."""
    return _iscsi_name(host)


@functools.lru_cache(maxsize=4096)
def image_of(name: str) -> str | None:
    """The image that a host serves by a target of this name; None for a target that is not ours."""
    authority, *parts = name.split(":")
    return _decoded(parts[1]) if authority == _AUTHORITY and len(parts) == 2 else None


@functools.lru_cache(maxsize=1024)
def serial_of(image: Image) -> str:
    """The serial of the image's disk, on every host the same: to a child they are paths to one disk."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, image.key))


def address_of(ip: str, port: int) -> str:
    """``iscsi://<ip>:<port>``, what a host registers."""
    return f"{SCHEME}://{f'[{ip}]' if ':' in ip else ip}:{port}"


def portal_of(address: str) -> tuple[str, int]:
    """The IP address and port of a host that is reached at ``iscsi://<ip>:<port>``. Raises BadAddress."""
    try:
        parts = urlsplit(address)
        ip, port = str(ipaddress.ip_address(parts.hostname or "")), parts.port or PORT
    except ValueError:
        ip, port = "", 0
    if not ip or parts.scheme != SCHEME or parts.path:
        raise BadAddress(f"{address!r} is not an address of this driver: {SCHEME}://<ip>:<port>")
    return ip, port


def _iscsi_name(*names: str) -> str:
    """The parts after the naming authority's. iSCSI names are of lower case and have no ``_`` (RFC 3722)."""
    name = ":".join((_AUTHORITY, *map(_encoded, names)))
    if len(name) > _LONGEST_NAME:
        raise BadAddress(f"the iSCSI name {name} has more than {_LONGEST_NAME} bytes: choose shorter names")
    return name


def _encoded(name: str) -> str:
    """The name as a part of an iSCSI name, each name as another one."""
    return re.sub("[A-Z_]", lambda found: "." + found[0].lower().replace("_", "-"), checked(name))


def _decoded(encoded: str) -> str:
    """The name that was encoded for an iSCSI name."""
    return re.sub("[.](.)", lambda found: "_" if found[1] == "-" else found[1].upper(), encoded)
