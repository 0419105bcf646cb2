"""The reads of one boot: what they are, what they cover, and how they are kept in a file.

A trace holds the reads that left a VM's private disk for the image below it, in the order in which they were asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from benchmarks.errors import BadTrace

_VERSION = 1

# nbdkit-log-filter(1); a line of a reply has "...Read" instead of "Read".
_LOGGED_READ = re.compile(
    r"(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+) connection=\d+ Read id=\d+"
    r" offset=(?P<offset>0x[0-9a-f]+) count=(?P<length>0x[0-9a-f]+)"
)


class Read(NamedTuple):
    """``at``: seconds since the first read; ``offset`` and ``length`` in bytes."""

    at: float
    offset: int
    length: int


@dataclass(frozen=True)
class Trace:
    """The reads of a boot of the image with this digest (``sha256:<hex>``) and size; ``boot_s``: seconds to login."""

    digest: str
    image_bytes: int
    boot_s: float
    reads: tuple[Read, ...]


def parse_nbdkit_log(lines: Iterable[str]) -> Iterator[Read]:
    """The reads in a log of nbdkit's log filter."""
    start: datetime | None = None
    for line in lines:
        found = _LOGGED_READ.match(line)
        if found is None:
            continue
        at = datetime.fromisoformat(found["at"])
        start = start or at
        yield Read((at - start).total_seconds(), int(found["offset"], 16), int(found["length"], 16))


def save(trace: Trace, path: Path) -> None:
    """Write a trace in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"version": _VERSION, **asdict(trace)}))
    fresh.rename(path)


def load(path: Path) -> Trace:
    """Read a trace. Raises BadTrace."""
    try:
        document = json.loads(path.read_text())
        if document.pop("version") != _VERSION:
            raise BadTrace(f"{path} is a trace of another version")
        reads = tuple(Read(float(at), int(offset), int(length)) for at, offset, length in document.pop("reads"))
        trace = Trace(**document, reads=reads)
        whole = all(0 <= read.offset <= trace.image_bytes - read.length and read.length > 0 for read in trace.reads)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadTrace(f"{path} is not a trace: {error}") from error
    if not whole or not trace.reads:
        raise BadTrace(f"{path} is not a trace: it has no reads, or reads beyond the image")
    return trace


def clusters(read: Read, cluster: int) -> range:
    """Numbers of the clusters that a read touches."""
    return range(read.offset // cluster, (read.offset + read.length - 1) // cluster + 1)


def boot_set_bytes(reads: Sequence[Read], cluster: int = 1, image_bytes: int | None = None) -> int:
    """Bytes in the union of the reads, each widened to whole clusters; the image's last cluster may be a short one."""
    covered, end = 0, 0
    for first, last in sorted(_widened(read, cluster, image_bytes) for read in reads):
        covered += max(0, last - max(first, end))
        end = max(end, last)
    return covered


def _widened(read: Read, cluster: int, image_bytes: int | None) -> tuple[int, int]:
    first = read.offset // cluster * cluster
    last = -(-(read.offset + read.length) // cluster) * cluster
    return first, last if image_bytes is None else min(last, image_bytes)


def first_touches(reads: Sequence[Read], cluster: int) -> list[int]:
    """Indexes of the reads that touch a cluster that no read before them has touched."""
    touched: set[int] = set()
    found = []
    for index, read in enumerate(reads):
        wanted = clusters(read, cluster)
        if not touched.issuperset(wanted):
            found.append(index)
            touched.update(wanted)
    return found


def untouched_offset(
    reads: Sequence[Read], image_bytes: int, room: int, fit: Callable[[int], bool] = lambda _offset: True
) -> int:
    """The start of the last range of ``room`` bytes, aligned to its own size, that no read touches and that is ``fit``.

    Raises BadTrace.
    """
    touched = {number for read in reads for number in clusters(read, room)}
    for number in range(image_bytes // room - 1, -1, -1):
        if number not in touched and fit(number * room):
            return number * room
    raise BadTrace(f"the boot reads something in every {room} bytes of the image")
