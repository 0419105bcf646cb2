"""The secret of an edge of an image's tree: known to Volt, one parent and one child of it only.

It is computed anew whenever it is needed, so that nothing but Volt's one key has to be kept.
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
