"""Programs that tests need or run, and qemu-io, which reads and writes disks as a VM's QEMU would."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from testtools import TestCase

PACKAGES = {
    "extlinux": "extlinux",
    "fio": "fio",
    "haproxy": "haproxy",
    "libvirtd": "libvirt-daemon-system",
    "mmdebstrap": "mmdebstrap",
    "mount": "mount",
    "qemu-img": "qemu-utils",
    "qemu-io": "qemu-utils",
    "qemu-storage-daemon": "qemu-system-common",
    "qemu-system-x86_64": "qemu-system-x86",
    "udp-receiver": "udpcast",
    "udp-sender": "udpcast",
    "uftp": "uftp",
    "uftpd": "uftp",
}


def require(test: TestCase, *programs: str) -> None:
    """Skip the test if a program is missing."""
    for name in programs:
        if shutil.which(name) is None:
            test.skipTest(f"{name} is missing: install the Debian package {PACKAGES[name]}")


def require_root(test: TestCase, what: str) -> None:
    """Skip the test unless root runs it; ``what`` needs that."""
    if os.geteuid() != 0:
        test.skipTest(f"not root: {what}")


def qemu_io(disk: Path | str, *commands: str, options: Sequence[str] = ("-f", "qcow2")) -> None:
    """Have qemu-io do something with a disk; AssertionError if that fails, or reads another pattern than it is to."""
    argv = ["qemu-io", *options, *(word for command in commands for word in ("-c", command)), str(disk)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode != 0 or "failed" in said:
        raise AssertionError(said)


def is_running(pid: int) -> bool:
    """Whether a process is there, and more than a zombie (proc(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def private_daemons(parent: int) -> list[int]:
    """The storage daemons that a process has for itself."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            its_parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if its_parent == parent and b"qemu-storage-daemon\0--chardev" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found
