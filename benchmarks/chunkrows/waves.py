"""Many VMs on many hosts that boot at once, as far as their disks are concerned (benchmarks.boot_wave)."""

from __future__ import annotations

import os
from typing import Any

from benchmarks import trace
from benchmarks.boot_wave import Boot, Size, checksum, local_wave
from benchmarks.chunkrows import boots
from benchmarks.chunkrows.scale import Job
from benchmarks.chunkrows.table import Line, at_most
from benchmarks.chunkrows.versions import NOW, checkouts, wave
from benchmarks.processes import say

CPU_BAR, FETCHED_BAR = 1.3, 1.0
_ROUNDING = 0.005
"""The bar for bytes has two decimals."""


def measure(job: Job) -> list[Line]:
    """Lines for each size; the version before plays the first size only. Raises BenchmarkError."""
    lines = []
    with boots.recorded(job) as boot:
        played = Boot(boot.image, boot.trace, 0.0, checksum(boot.image, boot.trace))
        for number, (hosts, vms) in enumerate(job.scale.waves):
            local = local_wave(Size(hosts, vms), played)["cpu_s"]["all"]
            done = {}
            for name, checkout in checkouts(job).items():
                if name == NOW or number == 0:
                    say(f"{name}: {hosts} hosts with {vms} VMs each")
                    done[name] = wave(checkout, boot.image, boot.file, hosts, vms)
            unit = done[NOW]["fetch_unit_bytes"]
            lines += lines_of(f"{hosts} hosts x {vms} replayed VMs", local, done, data_bytes(boot, unit))
    return lines


def lines_of(what: str, local: float, done: dict[str, dict[str, Any]], wanted: int) -> list[Line]:
    """``local``: processor seconds of the same VMs over a local file; ``wanted``: bytes that a boot needs."""
    now, local = done[NOW], max(local, 0.01)
    seconds = ", ".join(
        [f"local files {local:.1f} s", *(f"{name} {each['cpu_s']['all']:.1f} s" for name, each in done.items())]
    )
    fetched = max(now["fetched_bytes_per_host"])
    bytes_line = at_most(
        f"{what}: bytes of the worst host, times the boot's", FETCHED_BAR + _ROUNDING, fetched / wanted
    )
    return [
        at_most(f"{what}: processor time of all, times local files", CPU_BAR, now["cpu_s"]["all"] / local, seconds),
        bytes_line,
    ]


def data_bytes(boot: boots.Boot, unit: int) -> int:
    """What the boot reads, in whole units of so many bytes, without those that hold only zeros."""
    touched = {number for read in boot.trace.reads for number in trace.clusters(read, unit)}
    with boot.image.open("rb") as image:
        pieces = (os.pread(image.fileno(), unit, number * unit) for number in sorted(touched))
        return sum(unit for piece in pieces if any(piece))
