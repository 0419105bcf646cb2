"""A method of transfer that does nothing until the test says so."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

from drivers.base import Image, Place, Range, Taken
from drivers.errors import DriverError
from drivers.needs import Needs
from drivers.transfer.contract import Content, Terms
from tests.patience import PATIENCE

MIB = 1 << 20


class ContentDouble:
    """A source of which the second half of each image is missing."""

    def lacking(self, image: Image) -> Sequence[Range]:
        return [Range(image.size // 2, image.size // 2)]

    def put(self, image: Image, ranges: Sequence[Range], file: int) -> Taken:
        return Taken(kept=sum(each.length for each in ranges))

    def get(self, image: Image, ranges: Sequence[Range], file: int) -> None:
        """Nothing is written."""


class TransferDouble:
    """Ends when the test says how, or when it is stopped. ``made``: all of them, the last one last."""

    needs: ClassVar[Needs] = Needs()
    encrypts: ClassVar[bool] = False
    multicasts: ClassVar[bool] = False
    made: ClassVar[list[TransferDouble]] = []
    trouble: ClassVar[str] = ""
    """Why the next ones cannot get ready."""

    def __init__(self, place: Place, source: Content, image: Image) -> None:
        self.source, self.image = source, image
        self.terms: Terms | None = None
        self.begun, self.stopped = threading.Event(), False
        self.sent_bytes = 0
        self._ended = threading.Event()
        self._error = ""
        self.made.append(self)

    def offer(self) -> str:
        if self.trouble:
            raise DriverError(self.trouble)
        return "the sender"

    def expect(self) -> str:
        if self.trouble:
            raise DriverError(self.trouble)
        return "a receiver"

    def send(self, terms: Terms) -> None:
        self._run(terms)
        self.sent_bytes = sum(each.length for each in terms.ranges)

    def receive(self, terms: Terms) -> None:
        self._run(terms)

    def _run(self, terms: Terms) -> None:
        self.terms = terms
        self.begun.set()
        if not self._ended.wait(PATIENCE):
            raise AssertionError("the test has not ended the transfer")
        if self._error:
            raise DriverError(self._error)
        if not self.stopped:
            self.source.put(self.image, terms.ranges, -1)

    def end(self, error: str = "") -> None:
        """All has come, or an error has."""
        self._error = error
        self._ended.set()

    def stop(self) -> None:
        self.stopped = True
        self._ended.set()
