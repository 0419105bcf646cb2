"""One wave, in a process of its own: ``python -m benchmarks.openstack.wave WAY PLAN SOURCE WORK RESULT``.

WAY as in ``plan``; PLAN a file with it; SOURCE the image (qcow2), or for ``virtman`` the volume; WORK a folder for all
disks. RESULT gets the figures.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.attach import timed
from benchmarks.figures import spread
from benchmarks.openstack.plan import BOOT_SET_MIB, Plan
from benchmarks.processes import busy_seconds, cpu_seconds, say
from benchmarks.spreadimage import check_disk
from lab.tools import BUILD

if TYPE_CHECKING:
    from benchmarks.openstack.clouds import Wave


def measured(cloud: Wave) -> dict[str, Any]:
    """A wave on a cloud that is up."""
    load, cpu, busy, own = os.getloadavg(), cloud.cpu_seconds(), busy_seconds(), cpu_seconds(os.getpid())
    before = cloud.moved()
    seconds = cloud.start_wave()
    figures: dict[str, Any] = {
        "s": seconds, "moved": difference(cloud.moved(), before), "load_before": load,
        "cpu_s": {
            "machine": busy_seconds() - busy, "nova": cpu_seconds(os.getpid()) - own,
            **difference(cloud.cpu_seconds(), cpu),
        },
    }  # fmt: skip
    disks = cloud.server_disks()
    say(f"all {len(cloud.servers())} servers active after {seconds:.1f} s; each reads {BOOT_SET_MIB} MiB")
    if disks:
        figures["disk_s"], figures["last_disk_s"] = spread(cloud.disk_s), cloud.last_disk - cloud.began
        figures["boot_set_s"] = seconds + read_all(disks, cloud.plan)
        figures["boot_set_moved"] = difference(cloud.moved(), before)
    return figures


def difference(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What came since then."""
    return {name: value - before[name] for name, value in now.items()}


def read_all(disks: list[tuple[Path, str]], plan: Plan) -> float:
    """Every server reads its boot set, all at once. Returns the seconds of all. Raises WrongBytes."""
    reads = plan.image.reads(BOOT_SET_MIB)
    with ThreadPoolExecutor(len(disks)) as pool:
        return timed(lambda: list(pool.map(lambda disk: check_disk(disk[0], reads, disk[1]), disks)))


def main() -> int:
    """Returns the exit code."""
    way, plan, source, work, result = sys.argv[1], *map(Path, sys.argv[2:6])
    sys.argv[1:] = []  # Nova reads it when it is imported
    from nova import monkey_patch

    monkey_patch.patch()  # as Nova's programs do, before anything else of Nova
    from benchmarks.openstack.clouds import CLOUDS, Wave

    def act(cloud: Wave) -> None:
        result.write_text(json.dumps(measured(cloud)))

    Wave.plan, Wave.source, Wave.work, Wave.measured = Plan.read(plan), source, work, staticmethod(act)
    ended = unittest.TestResult()
    CLOUDS[way]("measure").run(ended)
    log = BUILD / f"nova-{way}.log"
    for _, why in [*ended.errors, *ended.failures]:
        log.write_text(why)
        print(f"{why[why.find('Traceback') :]}\nwhat Nova logged is in {log}", file=sys.stderr)
    return int(not ended.wasSuccessful())


if __name__ == "__main__":
    sys.exit(main())
