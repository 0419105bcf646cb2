"""The reads by which the data path of both stacks is measured, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from benchmarks.figures import MIB, percentile
from benchmarks.fio import Options

HOSTS = ("child", "parent")
"""The two at the ends of a link."""

LEVELS = (1, 3)
"""Hosts between the origin and the reader, the reader's own counted."""


@dataclass(frozen=True)
class Reads:
    """``number`` requests of ``request`` bytes, ``depth`` at a time; scattered if ``room`` has more bytes than that."""

    name: str
    request: int
    depth: int
    number: int
    room: int

    @property
    def total(self) -> int:
        """Bytes."""
        return self.number * self.request

    def options(self, start: int) -> Options:
        """For fio. The same again with the same start."""
        return {
            "rw": "randread" if self.room > self.total else "read",
            "bs": self.request, "iodepth": self.depth, "number_ios": self.number,
            "offset": start, "size": self.room, "randseed": start + 1,
        }  # fmt: skip


SINGLE = Reads("4 KiB", 4096, 1, 256, 16 * MIB)
PARALLEL = Reads("4 KiB, 16 at a time", 4096, 16, 512, 16 * MIB)
LARGE = Reads("1 MiB", MIB, 1, 32, 32 * MIB)
ALL = (SINGLE, PARALLEL, LARGE)

ROUNDS = 3
"""Of each kind of reads at each level, every one at a place of its own: other work of the machine is to decide none."""


class Places:
    """Where in an image the reads begin that nobody has read before."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, reads: Reads) -> int:
        """For these reads, from its beginning on."""
        place, self._next = self._next, self._next + reads.room
        return place


def image_bytes(times: int, kinds: Sequence[Reads] = ALL) -> int:
    """What an image has to have for all rounds of all kinds of reads at all levels, so many times."""
    return times * ROUNDS * len(LEVELS) * sum(reads.room for reads in kinds)


@dataclass(frozen=True)
class Measured:
    """Reads at a place of the tree. ``seconds``: of a request; ``cpu``: seconds per GiB, by host; ``requests``: of
    which a parent was asked for each MiB, None where nobody counts them.
    """

    delay_ms: int
    level: int
    state: str
    reads: str
    seconds: float
    bare: float
    cpu: dict[str, float]
    requests: float | None = None

    @property
    def ratio(self) -> float:
        """How many times as long as the bare one."""
        return self.seconds / self.bare

    def row(self) -> list[str]:
        """For a table."""
        return [
            f"{self.delay_ms} ms, {self.level} level{'s' * (self.level > 1)}, {self.state}, {self.reads}",
            f"{self.seconds * 1e6:.0f}",
            f"{self.ratio:.2f}",
            *(f"{self.cpu[who]:.2f}" if who in self.cpu else "" for who in HOSTS),
            "" if self.requests is None else f"{self.requests:.0f}",
        ]

    def figures(self) -> dict[str, Any]:
        """For a file."""
        return {**self.__dict__, "ratio": self.ratio}


def cold_and_warm(places: Places, reads: Reads, measure: Callable[[str, int], Measured]) -> Iterator[Measured]:
    """What reads take at places that nobody has read, and there again. ``measure`` gets the state and the place."""
    where = [places.take(reads) for _ in range(ROUNDS)]
    rounds = [[measure(state, place) for state in ("cold", "warm")] for place in where]
    yield from map(_of_rounds, zip(*rounds, strict=True))


def _of_rounds(rounds: Sequence[Measured]) -> Measured:
    """Medians, and of what is counted in hundredths of a second the mean."""
    first = rounds[0]
    return replace(
        first,
        seconds=percentile([each.seconds for each in rounds], 50),
        bare=percentile([each.bare for each in rounds], 50),
        cpu={who: mean(each.cpu[who] for each in rounds) for who in first.cpu},
        requests=None if first.requests is None else mean(each.requests or 0 for each in rounds),
    )


COLUMNS = ("reads", "µs each", "times bare", "child, CPU s/GiB", "parent, CPU s/GiB", "requests/MiB")
