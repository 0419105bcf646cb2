"""What an image's content is known by: its *digest*, and the *key* that names files, exports and disks after it.

A digest is ``sha256:`` and the SHA-256 of the content; or, of content that is served in place and that nobody has read
as a whole, ``id:`` and 64 hexadecimal digits that were drawn by lot when it was published.
"""

from __future__ import annotations

import secrets

PATTERN = r"^(sha256|id):[0-9a-f]{64}$"

LONGEST_KEY = 66
"""Characters."""

SHA256, DRAWN = "sha256:", "id:"
_DRAWN_KEY = "id"
"""Begins the keys of what was drawn: no hexadecimal digit is an ``i``."""


def key_of(digest: str) -> str:
    """The key of a digest: letters and digits, never the same for two digests."""
    return _DRAWN_KEY + digest.removeprefix(DRAWN) if digest.startswith(DRAWN) else digest.removeprefix(SHA256)


def digest_of(key: str) -> str:
    """The digest that has this key."""
    return DRAWN + key.removeprefix(_DRAWN_KEY) if key.startswith(_DRAWN_KEY) else SHA256 + key


def draw() -> str:
    """A digest that nothing has had before."""
    return DRAWN + secrets.token_hex(32)
