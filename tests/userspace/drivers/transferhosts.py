"""Hosts of a transfer for the tests of its methods: each is a process in a network namespace of its own.

As a program it is one such host. It prints its contact, reads the terms, and prints what came of its part.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import IO, Any

from drivers.base import Image, Place, Range, Taken
from drivers.errors import DriverError
from drivers.transfer.contract import Terms, Transfer
from lab.network import Network
from lab.tools import CHECKOUT

PIECE = 64 << 10
DONE, FAILED = "done", "failed"


class FileSource:
    """A plain file as a chunk store has it."""

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_RDWR)
        self.moved = 0
        self.on_piece: Callable[[], None] = lambda: None

    def lacking(self, image: Image) -> Sequence[Range]:
        return [Range(0, image.size)]

    def put(self, image: Image, ranges: Sequence[Range], file: int) -> Taken:
        for each in ranges:
            for offset in range(each.offset, each.offset + each.length, PIECE):
                wanted, data = min(PIECE, each.offset + each.length - offset), b""
                while len(data) < wanted and (more := os.read(file, wanted - len(data))):
                    data += more
                if len(data) < wanted:
                    raise DriverError("the file ends too early")
                os.pwrite(self._fd, data, offset)
                self._note(wanted)
        return Taken(kept=sum(each.length for each in ranges))

    def get(self, image: Image, ranges: Sequence[Range], file: int) -> None:
        for each in ranges:
            for offset in range(each.offset, each.offset + each.length, PIECE):
                data = memoryview(os.pread(self._fd, min(PIECE, each.offset + each.length - offset), offset))
                try:
                    while data:
                        data = data[os.write(file, data) :]
                except OSError as error:
                    raise DriverError(str(error)) from error
                self._note(PIECE)

    def _note(self, size: int) -> None:
        self.moved += size
        self.on_piece()


@dataclass(frozen=True)
class Job:
    """What a host is told. After ``at`` bytes were put or got it does ``act``: "kill" itself, or "stop"."""

    method: str
    role: str
    folder: str
    address: str
    file: str
    at: int = 0
    act: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """Names of the modules' constants, with other values."""


def main(job: Job) -> None:
    """Be a host."""
    logging.basicConfig(level=logging.INFO)
    for name, value in job.settings.items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    source = FileSource(Path(job.file))
    place = Place(Path(job.folder, "state"), Path(job.folder, "run"), address=job.address)
    image = Image("image", Path(job.file).stat().st_size, "blake3:" + "0" * 64)
    transfer: Transfer = EntryPoint("", job.method, "").load()(place, source, image)

    def note() -> None:
        if job.act and source.moved >= job.at:
            source.on_piece = lambda: None
            if job.act == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            stopping = threading.Thread(target=transfer.stop)
            stopping.start()
            stopping.join()

    source.on_piece = note
    print(transfer.offer() if job.role == "send" else transfer.expect(), flush=True)
    line = sys.stdin.readline()
    if line:
        told = json.loads(line)
        terms = Terms(**{**told, "ranges": [Range(*each) for each in told["ranges"]]})
        try:
            (transfer.send if job.role == "send" else transfer.receive)(terms)
            print(DONE, transfer.sent_bytes, flush=True)
        except DriverError as error:
            print(FAILED, error, flush=True)
        sys.stdin.readline()
    transfer.stop()


class Host:
    """One host, as a test sees it."""

    def __init__(self, network: Network, name: str, job: Job) -> None:
        argv = [*network.inside(name), sys.executable, "-m", __name__, json.dumps(asdict(job))]
        self.name, self._network = name, network
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT)
        self.contact = self._out.readline().strip()

    @property
    def _out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def _tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def begin(self, terms: Terms) -> None:
        told = {**asdict(terms), "ranges": [(each.offset, each.length) for each in terms.ranges]}
        self._tell(json.dumps(told))

    def outcome(self) -> str:
        """What came of its part; nothing of a host that was killed. Waits for that."""
        return self._out.readline().strip()

    def end(self) -> None:
        """Have it stop, and wait for its end."""
        self.process.communicate()


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
