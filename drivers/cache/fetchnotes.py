"""How much was fetched for an image since it joined its volume: bcache does not count what a volume holds of each.

The kernel's counter begins anew with each opening, so a note beside the image's header has what to add. A note is a
figure for people: one that cannot be read or written makes the figure too small, and is no error.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Note:
    """``held`` bytes were fetched for ``volume``, "" if none; ``before``: the same less what the kernel counts."""

    volume: str = ""
    before: int = 0
    held: int = 0

    def opened(self, volume: str, counted: int) -> Note:
        """The note after an opening, since which the kernel has counted so many bytes."""
        held = self.held if volume and volume == self.volume else 0
        return Note(volume, held - counted, held)

    def counted(self, volume: str, counted: int) -> Note:
        """The note once the kernel has counted so many bytes. What was fetched before the image joined is left out."""
        if not volume or volume != self.volume:
            return Note(volume, -counted)
        return Note(volume, self.before, max(0, self.before + counted))


def read(file: Path) -> Note:
    """The note in a file; an empty one if there is none that can be read."""
    try:
        return Note(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return Note()


def write(file: Path, note: Note) -> None:
    """Write a note that differs from what the file says."""
    if note != read(file):
        with contextlib.suppress(OSError):
            file.write_text(json.dumps(asdict(note)))
