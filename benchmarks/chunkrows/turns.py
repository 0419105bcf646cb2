"""More images than the pool can hold: its hit rate, against that of a cache that evicts whole images (LRU)."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from benchmarks.chunkrows.images import random_file
from benchmarks.chunkrows.scale import Job
from benchmarks.chunkrows.stores import Store, read_through, stores
from benchmarks.chunkrows.table import Line
from benchmarks.figures import MIB
from benchmarks.processes import say
from drivers.base import Image

IMAGES = 10
ROUNDS = 3
"""Of turns of all images."""


def measure(job: Job) -> list[Line]:
    """Lines for each order of images, and for the limit. Raises BenchmarkError."""
    scale = job.scale
    limit, size = scale.pool // scale.smaller, scale.pool_image // scale.smaller
    orders = {"in turn": list(range(IMAGES)) * ROUNDS, "the popular ones more often": popular(scale.turns)}
    lines, largest = [], 0
    with stores() as made:
        origin, names = made.start("origin"), [f"host-{number}" for number in range(len(orders))]
        images = [
            origin.publish(f"image-{number}", random_file(made.folder / f"{number}.raw", size), names)
            for number in range(IMAGES)
        ]
        for name, (what, order) in zip(names, orders.items(), strict=True):
            host = made.start(name, limit)
            rate, most = played(host, origin, images, order)
            largest = max(largest, most)
            lines.append(_compared(what, rate, image_lru_rate(order, size, limit)))
            host.stop()
    smaller = f"; sizes divided by {scale.smaller}" if scale.smaller > 1 else ""
    sizes = f"pool of {limit // MIB} MiB, ten images of {size // MIB} MiB{smaller}"
    within = Line(f"{sizes}: largest pool", "never above the limit", f"{largest / MIB:.1f} MiB", largest <= limit)
    return [within, *lines]


def _compared(what: str, rate: float, lru: float) -> Line:
    found = f"{rate:.3f}, and {lru:.3f} for LRU over whole images"
    return Line(f"hit rate, whole images read {what}", "at least that of LRU", found, rate >= lru)


def popular(turns: int) -> list[int]:
    """Images of so many turns: the n-th is chosen as often as 1/n says."""
    weights = [1 / rank for rank in range(1, IMAGES + 1)]
    return random.Random(turns).choices(range(IMAGES), weights, k=turns)


def played(host: Store, origin: Store, images: Sequence[Image], order: Iterable[int]) -> tuple[float, int]:
    """The host's hit rate when images are read as a whole, in this order; and the largest that its pool was."""
    for image in images:
        host.join(image, [origin])
    read, largest = 0, 0
    for turn, number in enumerate(order, start=1):
        read_through(host, images[number])
        read += images[number].size
        largest = max(largest, host.pool_file_bytes)
        if turn % IMAGES == 0:
            say(f"{host.name}: {turn} images read, pool {largest / MIB:.1f} MiB")
    return 1 - sum(map(host.fetched, images)) / read, largest


def image_lru_rate(order: Iterable[int], size: int, limit: int) -> float:
    """The hit rate of a cache that evicts the least recently used image as a whole, for images read as a whole."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = turns = 0
    for image in order:
        turns += 1
        hits += image in kept
        kept[image] = None
        kept.move_to_end(image)
        while len(kept) * size > limit:
            kept.popitem(last=False)
    return hits / turns
