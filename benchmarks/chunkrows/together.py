"""Many who read the same cold range at once: ten readers of one host, and ten children of one host."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.chunkrows.images import random_file
from benchmarks.chunkrows.scale import Job
from benchmarks.chunkrows.stores import Store, Stores, read_through, stores
from benchmarks.chunkrows.table import Line, at_most
from drivers.base import Image

MANY = 10
BAR = 1.0


def measure(job: Job) -> list[Line]:
    """Two lines: what a host fetched, as a multiple of the range. Raises BenchmarkError."""
    with stores() as made:
        readers = ten_readers(made, job.scale.shared)
        middle, children = ten_children(made, job.scale.shared)
    return [
        at_most(f"{MANY} readers of one cold range: fetched", BAR, readers),
        at_most(
            f"{MANY} children of one cold range: fetched by their parent", BAR, middle, f"by a child: {children:.3f}"
        ),
    ]


def ten_readers(made: Stores, size: int) -> float:
    """Programs of one host."""
    origin, host = made.start("origin-r"), made.start("host-r")
    image = origin.publish("readers", random_file(made.folder / "readers.raw", size), [host.name])
    host.join(image, [origin])
    _read_at_once([host] * MANY, image)
    return host.fetched(image) / size


def ten_children(made: Stores, size: int) -> tuple[float, float]:
    """Of the host that all read from, and the largest of the others."""
    origin, middle = made.start("origin-c"), made.start("middle")
    names = [f"child-{number}" for number in range(MANY)]
    image = origin.publish("children", random_file(made.folder / "children.raw", size), [middle.name])
    middle.join(image, [origin], names)
    children = [made.start(name) for name in names]
    for child in children:
        child.join(image, [middle])
    _read_at_once(children, image)
    return middle.fetched(image) / size, max(child.fetched(image) for child in children) / size


def _read_at_once(hosts: Sequence[Store], image: Image) -> None:
    with ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(lambda host: read_through(host, image), hosts))
