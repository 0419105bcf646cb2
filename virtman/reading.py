"""Reading the whole of what is served in place, for its digest: slowly, and only as long as nobody wants it back."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from drivers.digests import PIECE, Sum
from virtman.errors import HostTrouble
from virtman.hostfiles import translate_os_errors

log = logging.getLogger(__name__)

NICE = 19
LETS_GO_WITHIN = 60.0
"""Seconds: more than a disk needs for a piece, unless it does not answer."""


@dataclass
class Reader:
    """Somebody who reads. ``ending``: he is to end; ``ended``: he has, and has nothing open any more."""

    ending: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


class Readers:
    """Who reads, by name: one of each. May be used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[str, Reader] = {}
        self._closed = False

    @contextmanager
    def reading(self, name: str) -> Iterator[Reader]:
        """Be one who reads. What says that he may is to be asked inside: ``end`` says it first, and then calls."""
        reader = Reader()
        with self._lock:
            self._readers[name] = reader
            if self._closed:
                reader.ending.set()
        try:
            yield reader
        finally:
            with self._lock:
                del self._readers[name]
            reader.ended.set()

    def end(self, name: str) -> None:
        """Have who reads end, and wait until he has nothing open. Raises HostTrouble if he does not."""
        with self._lock:
            reader = self._readers.get(name)
        if reader is not None:
            reader.ending.set()
            if not reader.ended.wait(LETS_GO_WITHIN):
                raise HostTrouble(f"what image {name!r} is served from does not answer: it is still being read")

    def names(self) -> frozenset[str]:
        """Of all who read."""
        with self._lock:
            return frozenset(self._readers)

    def close(self) -> None:
        """Have all end, and all who come. Returns at once."""
        with self._lock:
            self._closed = True
            for reader in self._readers.values():
                reader.ending.set()


def digest_of(fd: int, size: int, kind: str, reader: Reader) -> str | None:
    """The digest of what is open, of so many bytes; None if the reader is to end. Raises HostTrouble.

    After each piece the reader rests for as long as it took: whoever else reads from the same disk has at least half of
    it.
    """
    with suppress(OSError):  # of this thread alone (Linux: setpriority(2))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    total, done = Sum(kind), 0
    with translate_os_errors("reading what is served in place"):
        while done < size:
            begun = time.monotonic()
            piece = os.pread(fd, min(PIECE, size - done), done)
            if not piece:
                raise HostTrouble(f"what is served in place ends after {done} bytes, and not after {size}")
            total.add(piece)
            os.posix_fadvise(fd, done, len(piece), os.POSIX_FADV_DONTNEED)  # memory is for what VMs read
            done += len(piece)
            if reader.ending.wait(time.monotonic() - begun):
                return None
    return total.digest()
