"""The secrets of the edges of an image's tree: each known to Volt, one parent and one child only.

They are computed anew whenever they are needed, so that nothing but Volt's one key has to be kept.

A parent that knows only the secrets of its children waits for Volt's next word before it lets a new child in. With the
*serving key* of an image the parent computes the *ticket* of any child itself. A ticket has a revision: that of the
assignment which named the parent to the child. So the parent knows which word is newer, the ticket or the parent's own
list of children, and refuses a child that a newer list does not name.
"""

from __future__ import annotations

import hashlib
import hmac
import json


def edge_secret(key: bytes, image: str, parent: str, child: str) -> str:
    """The secret with which two hosts prove to each other that Volt named them parent and child of an image.

    HMAC-SHA256 (RFC 2104) in hexadecimal, 64 digits: it tells nothing about the key or about another edge's secret. The
    names are written as a JSON list, which no other three names have.
    """
    return hmac.new(key, json.dumps([image, parent, child]).encode(), hashlib.sha256).hexdigest()


def serving_key(key: bytes, image: str, parent: str) -> str:
    """What a parent of an image computes tickets with: an HMAC-SHA256 in hexadecimal, known to Volt and that parent."""
    return hmac.new(key, json.dumps({"serving": [image, parent]}).encode(), hashlib.sha256).hexdigest()


def ticket(serving: str, child: str, revision: int) -> str:
    """The secret of a child that its assignment of this revision sends to the parent with this serving key.

    chunkd/src/tickets.rs computes the same.
    """
    return hmac.new(bytes.fromhex(serving), f"{child}/{revision}".encode(), hashlib.sha256).hexdigest()
