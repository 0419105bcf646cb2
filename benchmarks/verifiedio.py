"""Reads and writes of one VM's disk from several connections at once, every byte compared with what it must be.

Blocks that were not visited yet come first, so that reads go on to need the parents. Some blocks are written in part,
which makes the disk fetch the rest of what it keeps.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.errors import DiskFailed
from benchmarks.nbdreplay import NbdDisk

BLOCK = 16 << 10
CONNECTIONS = 4
PACE_S = 0.01
"""Pause of a connection between two visits: a disk in use, not a disk under stress."""

REQUEST_LIMIT_S = 60.0
"""Seconds after which a request counts as failed."""

_WRITE_EVERY = 4
_WRITE_AT, _WRITE_BYTES = 512, 2048  # neither whole clusters of a disk nor of a cache


class Request(NamedTuple):
    """When a request was sent and answered (monotonic seconds)."""

    began: float
    ended: float


class VerifiedIo:
    """Context manager: the I/O runs as long as the block. ``blocks``: numbers of blocks to visit, first to last.

    ``errors`` has what ended a connection, be it a failed request or a fault of ours; ``wrong`` the blocks with other
    bytes than they must have.
    """

    def __init__(self, server: Path, vm: str, image: Path, written: dict[int, bytes], blocks: Sequence[int]) -> None:
        """``written``: blocks that differ from the image by earlier I/O; this one adds its own."""
        self.requests: list[Request] = []
        self.errors: list[str] = []
        self.wrong: list[int] = []
        self.compared_bytes = 0
        self._server, self._vm, self._image, self._written = server, vm, image, written
        self._lock = threading.Lock()
        self._end = threading.Event()
        shares = [[block for block in blocks if block % CONNECTIONS == number] for number in range(CONNECTIONS)]
        self._threads = [threading.Thread(target=self._visit_all, args=[share], daemon=True) for share in shares]

    def __enter__(self) -> VerifiedIo:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _visit_all(self, blocks: Sequence[int]) -> None:
        """Only this connection visits these blocks, so what they must hold is known at any time."""
        try:
            with NbdDisk(self._server, self._vm) as disk, self._image.open("rb") as image:
                disk.set_timeout(REQUEST_LIMIT_S)
                number = 0
                while not self._end.wait(PACE_S):
                    block = blocks[number] if number < len(blocks) else random.choice(blocks)
                    image.seek(block * BLOCK)
                    self._visit(disk, block, image.read(BLOCK), write=number % _WRITE_EVERY == 0)
                    number += 1
        except Exception as error:  # noqa: BLE001  (whatever ends a reader, it has not read what it was to read)
            with self._lock:
                self.errors.append(str(error) if isinstance(error, DiskFailed) else repr(error))

    def _visit(self, disk: NbdDisk, block: int, original: bytes, *, write: bool) -> None:
        expected = self._written.get(block, original)
        if write:
            data = random.randbytes(_WRITE_BYTES)
            began = time.monotonic()
            disk.write(block * BLOCK + _WRITE_AT, data)
            self._note(began)
            expected = expected[:_WRITE_AT] + data + expected[_WRITE_AT + _WRITE_BYTES :]
            self._written[block] = expected
        began = time.monotonic()
        found = disk.read(block * BLOCK, BLOCK)
        self._note(began)
        with self._lock:
            self.compared_bytes += BLOCK
            if found != expected:
                self.wrong.append(block)

    def _note(self, began: float) -> None:
        with self._lock:
            self.requests.append(Request(began, time.monotonic()))


def wrong_blocks(server: Path, vm: str, image: Path, written: dict[int, bytes]) -> list[int]:
    """Blocks of the whole disk that differ from the image and from what was written. Raises DiskFailed."""
    wrong = []
    with NbdDisk(server, vm) as disk, image.open("rb") as file:
        disk.set_timeout(REQUEST_LIMIT_S)
        for block in range(image.stat().st_size // BLOCK):
            original = file.read(BLOCK)
            if disk.read(block * BLOCK, BLOCK) != written.get(block, original):
                wrong.append(block)
    return wrong
