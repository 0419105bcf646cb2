"""What an image's content is known by: its *digest*, and the *key* that names files, exports and disks after it.

A digest is a *sum* of the content, or a random number of content that was published in place and that nobody
has read as a whole. A new image gets a sum of the first kind. Earlier versions made the other two: who adds an origin
of an image takes the kind that the image has already.

- ``blake3-64k:`` and the BLAKE3 of the names of all chunks of 64 KiB (drivers/manifest.py);
- ``sha256:`` and the SHA-256 of the content;
- ``pieces:`` and the SHA-256 of the SHA-256s (32 bytes each) of its pieces of 4 MiB, of which the last may be shorter.

The sum of a piece of zeros is known for the first and the third kind: they take time for the data alone, wherever the
holes of a file are.

``id:`` and 64 hexadecimal digits is a number that was drawn.
"""

from __future__ import annotations

import hashlib
import secrets

PATTERN = r"^(blake3-64k|sha256|pieces|id):[0-9a-f]{64}$"

LONGEST_KEY = 66
"""Characters."""

BLAKE3, SHA256, PIECES, DRAWN = "blake3-64k:", "sha256:", "pieces:", "id:"
_LETTERS = {BLAKE3: "m", PIECES: "p", DRAWN: "id"}
"""What keys begin with that are not of a SHA-256: no hexadecimal digit is an ``m``, a ``p`` or an ``i``."""

PIECE = 4 << 20
"""Bytes."""
ZEROS = bytes(PIECE)
"""A piece. To the sums that know it, this very object costs nothing."""


def key_of(digest: str) -> str:
    """The key of a digest: letters and digits, never the same for two digests."""
    for kind, letters in _LETTERS.items():
        if digest.startswith(kind):
            return letters + digest.removeprefix(kind)
    return digest.removeprefix(SHA256)


def digest_of(key: str) -> str:
    for kind, letters in _LETTERS.items():
        if key.startswith(letters):
            return kind + key.removeprefix(letters)
    return SHA256 + key


def draw() -> str:
    """A digest that nothing has had before."""
    return DRAWN + secrets.token_hex(32)


def kind_of(digest: str) -> str:
    """With which word a digest begins."""
    return digest[: digest.index(":") + 1]


def proves_chunks(digest: str) -> bool:
    """Whether a host can check each chunk that it gets of the image, and not only the whole."""
    return kind_of(digest) == BLAKE3


class Sum:
    """Adds content up, piece by piece, to a digest of an earlier kind. ``drivers.manifest.Writer`` makes the others."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._whole = hashlib.sha256()
        self._of_zeros = hashlib.sha256(ZEROS).digest() if kind == PIECES else b""

    def add(self, piece: bytes) -> None:
        """The next ``PIECE`` bytes, or what is left."""
        if self._kind == SHA256:
            self._whole.update(piece)
        else:
            self._whole.update(self._of_zeros if piece is ZEROS else hashlib.sha256(piece).digest())

    def digest(self) -> str:
        return self._kind + self._whole.hexdigest()

    def keep(self) -> None:
        """Nothing: there is no manifest."""
