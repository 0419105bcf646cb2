"""Notes of how much was fetched for images, beside their headers: bcache does not count what a volume holds of each.

The kernel's own counter begins anew with each opening, so a note has a basis to add it to. A figure for people: no
image is kept from its users, or from being closed, for want of room for a note. One that cannot be written is taken
away, since its basis would be wrong: the figure begins anew.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from drivers.base import Image
from drivers.cache.cachefiles import file_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Note:
    """What was fetched for an image: ``now`` bytes in ``volume``; ``before``: less what the kernel counts."""

    volume: str = ""
    before: int = 0
    now: int = 0


class FetchNotes:
    """The notes in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lost: set[Image] = set()
        """Images of which it was said that their notes cannot be written."""

    def of(self, image: Image) -> Note:
        """The note of an image; an empty one if there is none that can be read."""
        try:
            return Note(**json.loads(self._file(image).read_text()))
        except FileNotFoundError:
            return Note()
        except (OSError, ValueError, TypeError) as error:
            log.warning("image %s: the note of what was fetched for it cannot be read: %s", image.name, error)
            return Note()

    def begin(self, image: Image, volume: str, counted: int) -> None:
        """After an opening: the kernel has counted so many bytes since. ``volume``: that of the image, "" if none."""
        note = self.of(image)
        held = note.now if volume and volume == note.volume else 0
        self._write(image, Note(volume, held - counted, held))

    def count(self, image: Image, volume: str, counted: int) -> None:
        """The kernel has counted so many bytes by now. What was fetched before it joined its volume is left out."""
        known = self.of(image)
        if volume and volume == known.volume:
            note = replace(known, now=max(0, known.before + counted))
        else:
            note = Note(volume, before=-counted)
        if note != known:
            self._write(image, note)

    def forget(self, image: Image) -> None:
        """Take a note away. Raises OSError."""
        self._file(image).unlink(missing_ok=True)

    def _write(self, image: Image, note: Note) -> None:
        fresh = file_of(self._folder, image, "json.new")
        try:
            fresh.write_text(json.dumps(asdict(note)))
            fresh.rename(self._file(image))
            self._lost.discard(image)
        except OSError as error:
            if image not in self._lost:  # not once more with each look
                log.warning("image %s: what was fetched for it is not written down: %s", image.name, error)
            self._lost.add(image)
            self._give_up(image)

    def _give_up(self, image: Image) -> None:
        try:
            self.forget(image)
        except OSError as error:
            log.warning("image %s: an old note of what was fetched for it stays: %s", image.name, error)

    def _file(self, image: Image) -> Path:
        return file_of(self._folder, image, "json")
