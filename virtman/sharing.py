"""What an image shares with its parent: chunks of the same name, of which a host keeps and fetches one.

The names are in the manifests (drivers/manifest.py). A host has the whole manifest of an image that it published, or
that its chunk store has read all pages of.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from drivers.base import Image
from drivers.manifest import CHUNK, NAME_OF_ZEROS, Missing, Reader


@dataclass(frozen=True)
class Amounts:
    """Bytes of an image in chunks that do not hold only zeros; None if this host does not know.

    ``own``: in chunks that the parent does not have; ``shared``: in the others.
    """

    data: int | None = None
    own: int | None = None
    shared: int | None = None


def amounts(state: Path, image: Image, parent: Image | None) -> Amounts:
    """What is known on this host. ``state``: the agent's state folder. Raises OSError."""
    data = None
    with ExitStack() as opened:
        try:
            child = opened.enter_context(Reader(state, image.digest, image.size))
            data = sum(name != NAME_OF_ZEROS for page in range(len(child.pages)) for name in child.names(page)) * CHUNK
            if parent is None:
                return Amounts(data)
            own = own_chunks(child, opened.enter_context(Reader(state, parent.digest, parent.size))) * CHUNK
        except Missing:
            return Amounts(data)
    return Amounts(data, own, data - own)


def own_chunks(child: Reader, parent: Reader) -> int:
    """How many chunks of an image, but those of zeros, its parent has nowhere. Raises Missing, OSError.

    The memory needed grows with what has changed. So chunks at the same place are compared first, and what is left
    with all of the parent.
    """
    same, left = set(parent.pages), Counter[bytes]()
    for page, name_of_page in enumerate(child.pages):
        if name_of_page not in same:
            there = {NAME_OF_ZEROS, *(parent.names(page) if page < len(parent.pages) else ())}
            left.update(name for name in child.names(page) if name not in there)
    for page in range(len(parent.pages)):
        if not left:
            break
        for name in parent.names(page):
            left.pop(name, None)
    return left.total()
