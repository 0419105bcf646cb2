"""How much each row of the chunk store's benchmark does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import MIB

GIB = 1024 * MIB


@dataclass(frozen=True)
class Scale:
    """Sizes in bytes. The defaults are those of the table; ``pool`` and ``pool_image`` are divided by ``smaller``."""

    name: str = "full"
    rounds: int = 3
    warm: int = 256 * MIB
    warm_reads: int = 40_000
    levels: tuple[int, ...] = (1, 4)
    levels_apart: int = 3
    boot: int = 0
    """Size of a made-up image and its reads; 0: the recorded boot of a real one."""
    waves: tuple[tuple[int, int], ...] = ((20, 5), (100, 10))
    shared: int = 128 * MIB
    base: int = 700 * MIB
    update: int = 70 * MIB
    sparse: int = 15 * GIB
    data: int = 100 * MIB
    other: int = 2 * GIB
    pool: int = 2 * GIB
    pool_image: int = GIB
    smaller: int = 4
    turns: int = 40
    connections: int = 1000
    images: int = 200
    samples: int = 1000
    kills: int = 50


FULL = Scale()
QUICK = Scale(
    name="quick", rounds=1, warm=16 * MIB, warm_reads=1000, levels=(1, 2), levels_apart=2, boot=32 * MIB,
    shared=16 * MIB, base=28 * MIB, update=8 * MIB, sparse=GIB, data=8 * MIB, other=32 * MIB, pool=128 * MIB,
    pool_image=64 * MIB, waves=((2, 1),), turns=40, connections=40, images=10, samples=100, kills=1,
)  # fmt: skip
"""To see that everything works: what it measures tells nothing."""


@dataclass(frozen=True)
class Job:
    """What a row gets. ``before``: a checkout of the userspace drivers; ``image``: for the recorded boot."""

    scale: Scale
    before: Path
    image: Path | None
