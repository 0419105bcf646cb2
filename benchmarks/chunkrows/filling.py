"""Hydration of a large image with little data: what travels."""

from __future__ import annotations

from benchmarks.chunkrows.images import sparse_file
from benchmarks.chunkrows.scale import GIB, Job
from benchmarks.chunkrows.stores import check_same, stores
from benchmarks.chunkrows.table import Line, at_most
from benchmarks.figures import MIB

BAR = 1.02


def measure(job: Job) -> list[Line]:
    """One line. Raises BenchmarkError."""
    size, data = job.scale.sparse, job.scale.data
    with stores() as made:
        origin, host = made.start("origin"), made.start("host")
        file = sparse_file(made.folder / "sparse.raw", size, data)
        image = origin.publish("sparse", file, [host.name])
        host.join(image, [origin])
        host.fill(image)
        travelled = host.received
        origin.stop()  # a host that has all needs no parent
        check_same(host, image, file)
    what = f"hydration of a sparse image of {size // GIB} GiB: travels, times its {data // MIB} MiB of data"
    return [at_most(what, BAR, travelled / data, f"{travelled / MIB:.1f} MiB")]
