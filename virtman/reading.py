"""Reading the whole of an image in place for its digest: slowly, and only until the image is to be removed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from drivers.digests import PIECE
from virtman.errors import HostTrouble
from virtman.hostfiles import translate_os_errors
from virtman.imagestore import Total

NICE = 19
ENDS_WITHIN = 60.0
"""Seconds: more than a disk needs for a piece, unless the disk does not answer."""


@dataclass
class Reader:
    """A thread that reads. ``ending``: it is to end; ``ended``: it has nothing open any more."""

    ending: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


class Readers:
    """At most one reader for each name. May be used by any thread."""

    def __init__(self) -> None:
        self._readers: dict[str, Reader] = {}
        self._closed = False

    @contextmanager
    def reading(self, name: str) -> Iterator[Reader]:
        """Be a reader. Check inside whether reading is allowed: who calls ``end`` forbids reading before."""
        self._readers[name] = reader = Reader()
        if self._closed:
            reader.ending.set()
        try:
            yield reader
        finally:
            del self._readers[name]
            reader.ended.set()

    def end(self, name: str) -> None:
        """Have the reader end, and wait until it has nothing open. Raises HostTrouble if it does not end."""
        reader = self._readers.get(name)
        if reader is not None:
            reader.ending.set()
            if not reader.ended.wait(ENDS_WITHIN):
                raise HostTrouble(f"what image {name!r} is served from does not answer: it is still being read")

    def names(self) -> frozenset[str]:
        return frozenset(self._readers.copy())

    def close(self) -> None:
        """Have all readers end, and all that begin later. Returns at once."""
        self._closed = True
        for reader in self._readers.copy().values():
            reader.ending.set()


def digest_of(fd: int, size: int, total: Total, reader: Reader) -> str | None:
    """The digest of ``size`` bytes of an open file or device; None if the reader is to end.

    After each piece the reader rests for as long as the piece took, so that others get half of the disk's time.
    Raises HostTrouble, and OSError for the manifest.
    """
    with suppress(OSError):  # of this thread alone (Linux: setpriority(2))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    done = 0
    while done < size:
        begun, wanted = time.monotonic(), min(PIECE, size - done)
        with translate_os_errors("reading what is served in place"):
            piece = os.pread(fd, wanted, done)
            os.posix_fadvise(fd, done, wanted, os.POSIX_FADV_DONTNEED)  # memory is for what VMs read
        done += len(piece)
        if len(piece) < wanted:
            raise HostTrouble(f"what is served in place ends after {done} bytes, and not after {size}")
        total.add(piece)
        if reader.ending.wait(time.monotonic() - begun):
            return None
    return total.digest()
