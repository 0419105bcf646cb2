"""What an image's content is known by: its *digest*, and the *key* that names files, exports and disks after it.

A digest is a *sum* of the content, or a random number of content that was published in place and that nobody
has read as a whole. There are two kinds of sums, and the size of the content says which one it gets. Who adds an
origin takes the kind that the image has already: who published the image in place may have named a SHA-256 of any size.

- ``sha256:`` and the SHA-256 of the content, up to ``LARGEST_WHOLE`` bytes;
- ``pieces:`` and the SHA-256 of the SHA-256s (32 bytes each) of its pieces of 4 MiB, of which the last may be shorter.

SHA-256 takes 0.6 s for each GiB, also of zeros. The sum of a piece of zeros is known: so the second kind takes time for
the data alone, wherever the holes of a file are.

``id:`` and 64 hexadecimal digits is a number that was drawn.
"""

from __future__ import annotations

import hashlib
import secrets

PATTERN = r"^(sha256|pieces|id):[0-9a-f]{64}$"

LONGEST_KEY = 66
"""Characters."""

SHA256, PIECES, DRAWN = "sha256:", "pieces:", "id:"
_LETTERS = {PIECES: "p", DRAWN: "id"}
"""What keys begin with that are not of a SHA-256: no hexadecimal digit is a ``p`` or an ``i``."""

LARGEST_WHOLE = 1 << 30
"""Bytes: of zeros alone, 0.6 s."""
PIECE = 4 << 20
"""Bytes."""
ZEROS = bytes(PIECE)
"""A piece. To ``Sum.add`` this very object costs nothing."""


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


def kind_for(size: int) -> str:
    """The kind of the sum of so many bytes."""
    return SHA256 if size <= LARGEST_WHOLE else PIECES


class Sum:
    """Adds content up, piece by piece."""

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
