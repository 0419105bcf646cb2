"""An image and updates of it, each made over the one before: what travels, and what depth costs a read."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.chunkrows.images import random_file, updated_file
from benchmarks.chunkrows.scale import Job, Scale
from benchmarks.chunkrows.stores import Store, Stores, check_same, read_through, stores
from benchmarks.chunkrows.table import Line, at_most
from benchmarks.figures import MIB, percentile
from benchmarks.processes import say
from drivers.base import Image

LAYERS = 8
TRAVEL_BAR, READ_BAR = 1.02, 1.0
LAYERS_BAR = 0.101
"""The published figures: 140 MB instead of 1,380."""
_NOISE = 0.05
"""Two runs of the same reads differ by so much."""


def measure(job: Job) -> list[Line]:
    """Lines for one update, for eight, and for reads. Raises BenchmarkError."""
    scale = job.scale
    with stores() as made:
        origin, host = made.start("origin"), made.start("host")
        base_file = random_file(made.folder / "base.raw", scale.base)
        base = _joined(origin, host, "base", base_file)
        host.fill(base)
        one, _ = _update(made, origin, host, "update", base_file, scale.update, 0)
        layers, last = _layers(made, origin, host, base_file, scale)
        ratio = _read_ratio(host, base, last, scale.rounds)
    what = f"an update of {scale.update // MIB} MiB over {scale.base // MIB} MiB that the host has: travels"
    whole, each = LAYERS * scale.base, scale.update // LAYERS // MIB
    figures = f"{layers / MIB:.1f} MiB instead of {whole / MIB:.0f}"
    return [
        at_most(what, TRAVEL_BAR, one / scale.update, f"{one / MIB:.1f} MiB"),
        at_most(
            f"{LAYERS} layers of {each} MiB, one after the other: travels, times whole images",
            LAYERS_BAR, layers / whole, figures,
        ),
        at_most(f"warm reads of {LAYERS} layers, times those of one; noise {_NOISE:g}", READ_BAR + _NOISE, ratio),
    ]  # fmt: skip


def _joined(origin: Store, host: Store, name: str, file: Path) -> Image:
    image = origin.publish(name, file, [host.name])
    host.join(image, [origin])
    return image


def _update(
    made: Stores, origin: Store, host: Store, name: str, below: Path, changed: int, seed: int
) -> tuple[int, Image]:
    """The bytes that a host receives for a new version that it reads as a whole; and that version."""
    file = updated_file(made.folder / f"{name}.raw", below, changed, seed)
    before = host.received
    image = _joined(origin, host, name, file)
    host.fill(image)
    travelled = host.received - before
    check_same(host, image, file)
    say(f"{name}: {travelled / MIB:.2f} MiB travelled for {changed / MIB:.2f} MiB")
    return travelled, image


def _layers(made: Stores, origin: Store, host: Store, below: Path, scale: Scale) -> tuple[int, Image]:
    """The bytes that all layers brought together, and the last one."""
    travelled, image = 0, None
    for number in range(1, LAYERS + 1):
        name = f"layer-{number}"
        changed = scale.update // LAYERS // MIB * MIB
        more, image = _update(made, origin, host, name, below, changed, number)
        travelled += more
        below = made.folder / f"{name}.raw"
    assert image is not None
    return travelled, image


def _read_ratio(host: Store, one: Image, many: Image, rounds: int) -> float:
    """Times that a whole warm read of ``many`` takes, in turn with ``one``; median of three times the rounds."""
    ratios = []
    for _ in range(3 * rounds):
        seconds = [_seconds(host, image) for image in (one, many)]
        ratios.append(seconds[1] / seconds[0])
    return percentile(ratios, 50)


def _seconds(host: Store, image: Image) -> float:
    began = time.monotonic()
    read_through(host, image)
    return time.monotonic() - began
