"""Images of random bytes for the chunk store's benchmark: no two chunks of them are alike."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.figures import MIB
from benchmarks.trace import Read, Trace, save
from lab.tools import BUILD


@contextmanager
def image_folder() -> Iterator[Path]:
    """A folder below build/, on the same disk as hosts' states; gone afterwards."""
    BUILD.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=BUILD, prefix="chunkstore-") as name:
        yield Path(name)


def random_file(path: Path, size: int) -> Path:
    """A file of random bytes."""
    with path.open("wb") as file:
        for start in range(0, size, MIB):
            file.write(os.urandom(min(MIB, size - start)))
    return path


def sparse_file(path: Path, size: int, data: int) -> Path:
    """A file with ``data`` random bytes, a MiB at a time at random places, and holes."""
    chooser = random.Random(size)
    with path.open("wb") as file:
        file.truncate(size)
        for place in chooser.sample(range(size // MIB), data // MIB):
            file.seek(place * MIB)
            file.write(os.urandom(MIB))
    return path


def updated_file(path: Path, base: Path, changed: int, seed: int) -> Path:
    """A copy with ``changed`` other bytes, a MiB at a time at random places."""
    path.write_bytes(base.read_bytes())
    places = random.Random(seed).sample(range(base.stat().st_size // MIB), changed // MIB)
    with path.open("r+b") as file:
        for place in places:
            file.seek(place * MIB)
            file.write(os.urandom(MIB))
    return path


def made_up_boot(image: Path, trace_file: Path, size: int) -> None:
    """An image and scattered reads of an eighth of it, none in its last quarter, to try a benchmark without a guest."""
    random_file(image, size)
    chooser = random.Random(size)
    reads = [Read(0.0, chooser.randrange(size // 16384 * 3 // 4) * 16384, 16384) for _ in range(size // 16384 // 8)]
    save(Trace("sha256:" + 64 * "0", size, 0.0, tuple(reads)), trace_file)
