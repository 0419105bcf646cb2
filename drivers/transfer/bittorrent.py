"""Images by BitTorrent: receivers send on what they have, so the sender's link carries the image once.

The torrent holds what some receiver lacks, and nothing else: zeros, and what all have, cost nothing. libtorrent serves
files only, so each host has a second copy of that meanwhile: the sender until all receivers are done, a receiver until
``stop``. libtorrent runs in a program of its own (swarm.py).
"""

from __future__ import annotations

import json
import queue
import shutil
import socket
import sys
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from drivers.base import Image, Place, Range
from drivers.door import door
from drivers.errors import DriverError, NoSpace
from drivers.host.space import Room
from drivers.host.watch import Watch
from drivers.needs import Library, Needs
from drivers.transfer.contract import Content, Terms
from drivers.transfer.program import Program

FOLDER, PREFIX, FILE = "transfer", "bittorrent-", "content"
"""In the state folder, for all methods; of one transfer in that; in this one, as swarm.py has it."""
PATIENCE = 20.0
"""Seconds after which a transfer ends in which nothing happens."""
SMALLEST, MOST = 128 << 10, 4096
"""Bytes of a piece, and pieces. A host sends on whole pieces only, and tells all its peers of each."""
_PROGRAM = Path(__file__).with_name("swarm.py")


class Torrent:
    """What a torrent holds: ranges of the image, one after the other, in pieces of whole chunks."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = ranges
        self._starts = list(accumulate((each.length for each in ranges), initial=0))
        self.length = self._starts[-1]
        self.piece = SMALLEST
        while self.piece * MOST < self.length:
            self.piece *= 2
        self.pieces = range(-(-self.length // self.piece))

    def ranges(self, begin: int, end: int) -> Iterator[Range]:
        """Where in the image the pieces from ``begin`` to before ``end`` are."""
        at, stop = begin * self.piece, min(end * self.piece, self.length)
        index = bisect_right(self._starts, at) - 1
        while at < stop:
            here = min(stop, self._starts[index + 1])
            yield Range(self._ranges[index].offset + at - self._starts[index], here - at)
            at, index = here, index + 1

    def wanted(self, lacking: Sequence[Range]) -> list[int]:
        """The pieces that hold any of these ranges."""
        ends = [each.offset + each.length for each in lacking]

        def lacks(part: Range) -> bool:
            index = bisect_right(ends, part.offset)
            return index < len(ends) and lacking[index].offset < part.offset + part.length

        return [piece for piece in self.pieces if any(map(lacks, self.ranges(piece, piece + 1)))]


class Swarm:
    """The program of one transfer, and the folder of its file."""

    def __init__(self, place: Place, role: str) -> None:
        """Start it. Raises OSError."""
        state = place.state / FOLDER
        state.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=state))
        self.sent = 0
        self._argv = [sys.executable, "-P", str(_PROGRAM), role, place.address]
        self._program: Program | None = None
        self._stopped = threading.Event()
        self._heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._socket, self._its = socket.socketpair()
        self._watch = Watch("bittorrent", self._run)
        self._watch.start()

    def tell(self, job: dict[str, Any]) -> None:
        """Say what to do. Raises OSError if it has ended."""
        self._socket.sendall(json.dumps(job).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """Wait for what it says next. Raises DriverError if that is an error, or if it has ended."""
        words = self._heard.get()
        if "error" in words:
            self._heard.put(words)
            raise DriverError(f"BitTorrent: {words['error']}")
        return words

    def stop(self) -> None:
        """End it, and delete the folder."""
        self._stopped.set()
        if self._program is not None:
            self._program.kill()
        self._watch.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> None:
        """Be the thread with which the program ends."""
        error = "it was stopped"
        try:
            with (
                self._socket,
                self._its as its,
                Program(self._argv, stdin=its.fileno(), stdout=its.fileno()) as program,
            ):
                its.close()
                self._program = program
                if not self._stopped.is_set():
                    self._listen()
                    program.wait()
        except (DriverError, OSError, ValueError) as failure:
            error = str(failure)
        self._heard.put({"error": error})

    def _listen(self) -> None:
        with self._socket.makefile() as lines:
            for words in map(json.loads, lines):
                self.sent = words.get("sent", self.sent)
                if "sent" not in words:
                    self._heard.put(words)


@door
class BittorrentTransfer:
    """Peers know each other by the terms: there is no tracker."""

    needs = Needs(libraries=(Library("libtorrent", "python3-libtorrent", "libtorrent"),), address=True)
    encrypts = False
    """What libtorrent has is RC4 with a key that follows from what passes in the clear: nobody proves who he is."""
    multicasts = False

    def __init__(self, place: Place, source: Content, image: Image) -> None:
        self._place, self._source, self._image = place, source, image
        self._lock = threading.Lock()
        self._stopped = False
        self._swarm: Swarm | None = None

    def offer(self) -> str:
        return self._begin("send")

    def expect(self) -> str:
        return self._begin("receive")

    def _begin(self, role: str) -> str:
        with self._lock:
            if self._stopped:
                raise DriverError("the transfer was stopped")
            self._swarm = Swarm(self._place, role)
        try:
            contact: str = self._swarm.hear()["contact"]
        except DriverError:
            self.stop()
            raise
        return contact

    def send(self, terms: Terms) -> None:
        """First the file is made and hashed: only the terms say what it holds."""
        with self._working() as swarm:
            torrent = Torrent(terms.ranges)
            self._check_room(torrent.length)
            with (swarm.folder / FILE).open("wb", buffering=0) as file:
                self._source.get(self._image, terms.ranges, file.fileno())
            swarm.tell(_job(swarm, terms, torrent))
            swarm.hear()
        self.stop()

    def receive(self, terms: Terms) -> None:
        with self._working() as swarm:
            torrent = Torrent(terms.ranges)
            wanted = torrent.wanted(self._source.lacking(self._image))
            self._check_room(min(torrent.length, len(wanted) * torrent.piece))
            swarm.tell({**_job(swarm, terms, torrent), "sender": terms.sender, "wanted": wanted, "limit": terms.limit})
            while "done" not in (words := swarm.hear()):
                self._put(swarm, torrent, words["pieces"])

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
        if self._swarm is not None:
            self._swarm.stop()

    @property
    def sent_bytes(self) -> int:
        return self._swarm.sent if self._swarm is not None else 0

    @contextmanager
    def _working(self) -> Iterator[Swarm]:
        """After an error nothing is left; after ``stop`` none is one."""
        if self._swarm is None:
            raise DriverError("nothing was offered or expected")
        try:
            yield self._swarm
        except (DriverError, OSError):
            stopped = self._stopped
            self.stop()
            if not stopped:
                raise

    def _check_room(self, needed: int) -> None:
        state = self._place.state
        if (free := Room(state, self._place.reserve).spare(state)) < needed:
            raise NoSpace(state / FOLDER, free, needed)

    def _put(self, swarm: Swarm, torrent: Torrent, runs: Sequence[tuple[int, int]]) -> None:
        with (swarm.folder / FILE).open("rb", buffering=0) as file:
            for begin, end in runs:
                if self._stopped:
                    return
                file.seek(begin * torrent.piece)
                if self._source.put(self._image, list(torrent.ranges(begin, end)), file.fileno()).full:
                    raise DriverError(f"no room for image {self._image.name}")


def _job(swarm: Swarm, terms: Terms, torrent: Torrent) -> dict[str, Any]:
    """What both sides tell swarm.py."""
    size = {"number": terms.number, "length": torrent.length, "piece": torrent.piece}
    return {"folder": str(swarm.folder), "receivers": list(terms.receivers), "patience": PATIENCE, **size}
