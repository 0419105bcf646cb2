"""Which volumes are bases, and what belongs to a server that boots from one is called.

All names are made of the UUIDs of volume and server, so that no host has to remember them, and whoever repeats a call
finds what the first one made.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

MARK, MARKED = "virtman_base", "true"
"""The key and the value in a volume's metadata that make it a base."""

_PREFIX = "nova-"
_DISK = re.compile(rf"{_PREFIX}(?P<server>[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})-[0-9a-f]{{18}}")
_ATTACHMENT = re.compile(r"76697274-6d61-8[0-9a-f]{3}-8[0-9a-f]{3}-[0-9a-f]{12}")
"""A UUID of version 8, whose content its maker chooses (RFC 9562, 5.8): "virtma" first. Cinder draws version 4."""


def is_base(volume: Mapping[str, Any]) -> bool:
    """Whether an operator has marked a volume, as nova.volume.cinder tells it, as a base."""
    return bool(volume.get("volume_metadata", {}).get(MARK) == MARKED)


def image_of(volume_id: str) -> str:
    """The image that stands for a base."""
    return f"cinder-{volume_id}"


def disk_of(server: str, volume_id: str) -> str:
    """A server's private disk of a base."""
    return f"{_PREFIX}{server}-{_digits(server, volume_id)}"


def server_of(disk: str) -> str | None:
    """The server whose private disk has this name; None if it is nobody's."""
    found = _DISK.fullmatch(disk)
    return found["server"] if found else None


def attachment_of(server: str, volume_id: str) -> str:
    """The ID of the attachment of a server to a base, which Cinder does not know."""
    digits = _digits(server, volume_id)
    return f"76697274-6d61-8{digits[:3]}-8{digits[3:6]}-{digits[6:]}"


def is_ours(attachment_id: str | None) -> bool:
    """Whether it is the ID of an attachment to a base."""
    return attachment_id is not None and _ATTACHMENT.fullmatch(attachment_id) is not None


def _digits(server: str, volume_id: str) -> str:
    return hashlib.blake2b(f"{server} {volume_id}".encode(), digest_size=9).hexdigest()
