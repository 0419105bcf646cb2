"""The reads of a recorded boot, one after the other, on a host that has nothing of the image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import trace
from benchmarks.boot_wave import checksum
from benchmarks.chunkrows.images import image_folder, made_up_boot
from benchmarks.chunkrows.scale import Job
from benchmarks.chunkrows.table import Line, at_most
from benchmarks.chunkrows.versions import BEFORE, IMAGE, NOW, chain, checkouts
from benchmarks.errors import WrongBytes
from benchmarks.figures import percentile
from benchmarks.nbdreplay import Disk, replay
from benchmarks.processes import say
from benchmarks.recorder import boot_trace
from lab.guest import guest

BAR = 0.5
_LIMIT = 600.0


@dataclass(frozen=True)
class Boot:
    """An image, the reads of its boot, and the file that has them."""

    image: Path
    trace: trace.Trace
    file: Path


@contextmanager
def recorded(job: Job) -> Iterator[Boot]:
    """The boot of the job's image, or of the lab's guest; a made-up one if the scale says so."""
    with image_folder() as folder:
        file = folder / "trace.json"
        if job.scale.boot:
            image = folder / "image.raw"
            made_up_boot(image, file, job.scale.boot)
        else:
            image = (job.image or guest().disk).absolute()
            trace.save(boot_trace(image), file)
        yield Boot(image, trace.load(file), file)


def measure(job: Job) -> list[Line]:
    """A line for each number of levels. Raises DiskFailed, Failed, TookTooLong, WrongBytes."""
    lines = []
    with recorded(job) as boot:
        for levels in job.scale.levels:
            seconds: dict[str, list[float]] = {NOW: [], BEFORE: []}
            for number in range(job.scale.rounds):
                for name, checkout in checkouts(job).items():
                    seconds[name].append(cold_boot(checkout, boot, levels))
                    say(f"round {number + 1}, {levels} levels, {name}: {seconds[name][-1]:.3f} s")
            now, before = (percentile(seconds[name], 50) for name in (NOW, BEFORE))
            what = f"recorded boot, cold, levels: {levels}; TLS, times before on unix sockets"
            lines.append(at_most(what, BAR, now / before, f"{now:.2f} s, {before:.2f} s"))
    return lines


def cold_boot(checkout: Path, boot: Boot, levels: int) -> float:
    """Seconds, on the last of fresh hosts."""
    with chain(checkout, boot.image, levels) as hosts:
        disk = Disk(IMAGE, "host", hosts.socket(levels), verify=True)
        [done] = replay([disk], boot.trace.reads, think=0, limit=_LIMIT).vms
    if done.checksum != checksum(boot.image, boot.trace):
        raise WrongBytes(f"the boot through {levels} levels read other bytes than the image has")
    return done.ended - done.began
