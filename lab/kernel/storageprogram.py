"""What ``lab.kernel.storage`` has a guest do: ``serve|withdraw IP FILE [BYTES]``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import rtslib_fb

TARGET, NAME, PORT = "iqn.2026-01.com.example:storage", "a-volume", 3260


def serve(ip: str, file: str, size: str) -> None:
    """Export a file of random bytes. Whoever logs in may write, as where networks alone tell hosts apart."""
    with Path(file).open("wb") as opened:
        for _ in range(int(size) >> 20):
            opened.write(os.urandom(1 << 20))
    disk = rtslib_fb.BlockStorageObject(NAME, dev=_run("losetup", "--find", "--show", "--direct-io=on", file))
    portals = rtslib_fb.TPG(rtslib_fb.Target(rtslib_fb.FabricModule("iscsi"), TARGET), 1)
    for name, value in {"authentication": 0, "generate_node_acls": 1, "demo_mode_write_protect": 0}.items():
        portals.set_attribute(name, str(value))
    rtslib_fb.LUN(portals, 1, disk)
    rtslib_fb.NetworkPortal(portals, ip, PORT)
    portals.enable = True


def withdraw(_ip: str, file: str) -> None:
    """Be no storage any more; to be none is fine."""
    root = rtslib_fb.RTSRoot()
    for target in [target for target in root.targets if target.wwn == TARGET]:
        target.delete()
    for disk in [disk for disk in root.storage_objects if disk.name == NAME]:
        disk.delete()
    if Path(file).exists():
        if loop := _loop(file):
            _run("losetup", "--detach", loop)
        Path(file).unlink()


def _loop(file: str) -> str:
    return _run("losetup", "--noheadings", "--output", "NAME", "--associated", file)


def _run(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


ACTS: dict[str, Callable[..., None]] = {"serve": serve, "withdraw": withdraw}

if __name__ == "__main__":
    ACTS[sys.argv[1]](*sys.argv[2:])
