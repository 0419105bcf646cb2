"""Notes of how much was fetched for images, beside their headers: bcache does not count what a volume holds of each.

The kernel's own counter begins anew with each opening, so a note has a basis to add it to. A figure for people: no
image is kept from its users, or from being closed, for want of room for a note. What cannot be written is remembered
until there is room. The next agent goes on from what is written: if that has another basis, it is taken away.
"""

from __future__ import annotations

import contextlib
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
        self._unwritten: dict[Image, Note] = {}
        """What there was no room for."""
        self._said: dict[Image, set[str]] = {}
        """What was logged of an image's note: not once more with each look."""

    def of(self, image: Image) -> Note:
        """The note of an image; an empty one if there is none that can be read."""
        try:
            return self._note(image)
        except OSError as error:
            self._say(image, f"the note of what was fetched for it cannot be read: {error}")
            return Note()

    def begin(self, image: Image, volume: str, counted: int) -> None:
        """After an opening: the kernel has counted so many bytes since. ``volume``: that of the image, "" if none."""
        note = self.of(image)
        held = note.now if volume and volume == note.volume else 0
        self._keep(image, Note(volume, held - counted, held))

    def count(self, image: Image, volume: str, counted: int) -> None:
        """The kernel has counted so many bytes by now. What was fetched before it joined its volume is left out."""
        try:
            known = self._note(image)
        except OSError as error:  # what it was is known again with the next look
            self._say(image, f"what was fetched for it is not counted: {error}")
            return
        if volume and volume == known.volume:
            note = replace(known, now=max(0, known.before + counted))
        else:
            note = Note(volume, before=-counted)
        if note != known or image in self._unwritten:
            self._keep(image, note)

    def forget(self, image: Image) -> None:
        """Take a note away. Raises OSError."""
        self._unwritten.pop(image, None)
        self._file(image).unlink(missing_ok=True)

    def forget_all(self, key: str) -> None:
        """The files of all images with this key are gone."""
        for image in [image for image in self._unwritten if image.key == key]:
            del self._unwritten[image]

    def _note(self, image: Image) -> Note:
        """Raises OSError."""
        if (unwritten := self._unwritten.get(image)) is not None:
            return unwritten
        try:
            note = Note(**json.loads(self._file(image).read_text()))
        except FileNotFoundError:
            return Note()
        except (ValueError, TypeError) as error:
            self._say(image, f"the note of what was fetched for it makes no sense: {error}")
            return Note()
        return replace(note, now=max(0, note.now))  # an earlier release wrote less than nothing where there was no room

    def _keep(self, image: Image, note: Note) -> None:
        fresh = file_of(self._folder, image, "json.new")
        try:
            fresh.write_text(json.dumps(asdict(note)))
            fresh.rename(self._file(image))
        except OSError as error:
            self._unwritten[image] = note
            self._say(image, f"what was fetched for it is not written down: {error}")
            self._take_back(image, note)
        else:
            self._unwritten.pop(image, None)
            self._said.pop(image, None)

    def _take_back(self, image: Image, note: Note) -> None:
        """Remove what is written of an image if it has another basis than this."""
        with contextlib.suppress(OSError, ValueError, TypeError):  # it is not there, or makes no sense, or has to stay
            written = Note(**json.loads(self._file(image).read_text()))
            if (written.volume, written.before) != (note.volume, note.before):
                self._file(image).unlink()

    def _say(self, image: Image, what: str) -> None:
        said = self._said.setdefault(image, set())
        if what not in said:
            log.warning("image %s: %s", image.name, what)
        said.add(what)

    def _file(self, image: Image) -> Path:
        return file_of(self._folder, image, "json")
