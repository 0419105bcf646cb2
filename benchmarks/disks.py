"""Open VMs' disks as the VMs' own QEMUs would, and export them for a replay."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import processes
from lab.tools import run

BlockNode = Mapping[str, Any]
"""Options of one QEMU --blockdev."""


@contextlib.contextmanager
def exported(folder: Path, hosts: Mapping[str, Mapping[str, BlockNode]]) -> Iterator[Mapping[str, Path]]:
    """Open the disks (by VM) of all hosts, with one storage daemon per host. Gives the daemons' sockets by host.

    The daemons are only started here: a client waits until the disk is there.
    """
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for host, disks in hosts.items():
            with (folder / f"{host}.log").open("wb") as log:
                argv = daemon_argv(folder / f"{host}.sock", disks)
                daemons.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        yield {host: folder / f"{host}.sock" for host in hosts}
    finally:
        processes.stop(daemons)


def daemon_argv(server: Path, disks: Mapping[str, BlockNode]) -> list[str]:
    """A storage daemon's command line for some disks, each exported under its VM's name."""
    argv = [
        processes.tool("qemu-storage-daemon"),
        "--nbd-server",
        f"addr.type=unix,addr.path={server},max-connections=0",
    ]
    for vm, node in disks.items():
        argv += ["--blockdev", json.dumps({**node, "node-name": vm})]
        argv += ["--export", f"nbd,id={vm},node-name={vm},name={vm},writable=on"]
    return argv


def local_disks(folder: Path, image: Path, vms: Mapping[str, list[str]]) -> dict[str, dict[str, BlockNode]]:
    """Private disks directly over a raw file, for the VMs (values) of each host: VMs without VirtMan."""
    first = folder / "empty.qcow2"
    empty_disk(first, image, image.stat().st_size)
    disks: dict[str, dict[str, BlockNode]] = {}
    for host, names in vms.items():
        disks[host] = {}
        for vm in names:
            path = folder / f"{vm}.qcow2"
            path.write_bytes(first.read_bytes())
            backing = {"driver": "raw", "read-only": True, "file": {"driver": "file", "filename": str(image)}}
            disks[host][vm] = {
                "driver": "qcow2", "file": {"driver": "file", "filename": str(path)}, "backing": backing,
            }  # fmt: skip
    return disks


def empty_disk(path: Path, image: Path, size: int) -> None:
    """A private disk over a raw file, of the same layout as VirtMan's own: drivers/snapshot/qcow2.py."""
    layout = ["-f", "qcow2", "-o", "cluster_size=128k,extended_l2=on", "-F", "raw", "-b", str(image)]
    run([processes.tool("qemu-img"), "create", "-q", "-u", *layout, path, str(size)])
