"""Hosts as a program that runs with the modules of either version: this one's, or those before the chunk store.

So it uses only what both have. It writes a line of JSON when its hosts are ready, or have done what they had to, and
ends them when its input ends.

    python either.py chain FOLDER IMAGE LEVELS
    python either.py wave FOLDER IMAGE TRACE HOSTS VMS_PER_HOST
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import boot_wave, hosts, trace
from lab.cluster import Cluster

NAME = "img"


def chain(folder: Path, image: Path, levels: int) -> None:
    """An origin of the image and a host for each level, all attached. Tells their run folders."""
    with Cluster(folder, levels + 1, volt_options=["--fanout", "1"]) as cluster:
        cluster.agents[0].publish(NAME, image)
        for level in range(1, levels + 1):
            cluster.agents[level].create(f"vm-{level}", NAME)
        where = hosts.settled_places(cluster, NAME)
        for level, host in enumerate(cluster.names[1:], start=1):
            if where[host].depth != level:
                raise SystemExit(f"{host} is at level {where[host].depth}, not {level}")
        print(json.dumps({"hosts": [str(cluster.run_folder(host)) for host in range(levels + 1)]}), flush=True)
        sys.stdin.read()


def wave(image: Path, trace_file: Path, host_number: int, vms_per_host: int) -> None:
    """All VMs boot at once. Tells the figures."""
    reads = trace.load(trace_file)
    boot = boot_wave.Boot(image, reads, 0.0, boot_wave.checksum(image, reads))
    leftovers: list[str] = []
    figures = boot_wave.cluster_wave("chunkstore", boot_wave.Size(host_number, vms_per_host), boot, 2, leftovers)
    print(json.dumps({**figures, "leftovers": leftovers}), flush=True)


def main() -> None:
    """Do what the command line says."""
    kind, folder, image, *more = sys.argv[1:]
    if kind == "chain":
        chain(Path(folder), Path(image), int(more[0]))
    else:
        wave(Path(image), Path(more[0]), int(more[1]), int(more[2]))


if __name__ == "__main__":
    main()
