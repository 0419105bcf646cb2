"""Who may log in to the images that this host serves.

A stack takes seconds to make, and all that time the lock of its image is held. Children that Volt names meanwhile do
not wait for it: they log in, and find the disk when it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from drivers.base import Child, ExportDriver
from drivers.host.locks import NamedLocks


class Admission:
    """Keeps who is let in by what Volt said last: assignments may come in any order, from several threads."""

    def __init__(self, export: ExportDriver) -> None:
        self._export = export
        self._locks = NamedLocks()
        self._revisions: dict[str, int] = {}
        """Of the assignment that says who is let in, by image; an image without one has no endpoint."""

    def open(self, image: str, revision: int, children: Sequence[Child]) -> None:
        """The image has an endpoint: let exactly these in, unless later ones are known already. Raises DriverError."""
        with self._locks.hold(image):
            if revision >= self._revisions.get(image, revision):
                self._export.allow(image, children)
                self._revisions[image] = revision

    def update(self, image: str, revision: int, children: Sequence[Child]) -> None:
        """As ``open``, if the image is open. Raises DriverError."""
        with self._locks.hold(image):
            if revision > self._revisions.get(image, revision):
                self._export.allow(image, children)
                self._revisions[image] = revision

    def close(self, image: str) -> None:
        """The endpoint is about to go, or what Volt said of it does not count any more."""
        with self._locks.hold(image):
            self._revisions.pop(image, None)

    @contextmanager
    def unchanged(self, image: str) -> Iterator[None]:
        """Nobody is let in or sent away inside: the disk is being shown to those who are there."""
        with self._locks.hold(image):
            yield
