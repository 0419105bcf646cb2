"""Programs that a benchmark starts, and what the processes it looks at have used (proc(5))."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.errors import ToolMissing

PACKAGES = {
    "nsenter": "util-linux",
    "scp": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "nbdkit": "nbdkit",
    "qemu-img": "qemu-utils",
    "qemu-io": "qemu-utils",
    "qemu-nbd": "qemu-utils",
    "qemu-storage-daemon": "qemu-system-common",
    "qemu-system-x86_64": "qemu-system-x86",
}
"""The Debian packages of the programs that benchmarks run themselves."""

_STOP_GRACE = 5.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def say(message: str) -> None:
    """Progress, for people."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def tool(name: str) -> str:
    """The path of a program of PACKAGES. Raises ToolMissing."""
    path = shutil.which(name)
    if path is None:
        raise ToolMissing(name, PACKAGES[name])
    return path


@contextlib.contextmanager
def running(argv: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A program of PACKAGES that runs as long as the block; ``how`` goes to Popen. Raises ToolMissing."""
    process = subprocess.Popen([tool(argv[0]), *argv[1:]], stdin=subprocess.DEVNULL, **how)
    try:
        yield process
    finally:
        stop([process])
        if process.stdout is not None:
            process.stdout.close()


def stop(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """End all of them side by side: SIGTERM, and SIGKILL for those that still run after a grace time."""
    processes = list(processes)
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _STOP_GRACE
    for process in processes:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used; 0 when it has ended."""
    after_name = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    # proc(5): state is field 3, utime 14, stime 15.
    return (int(after_name[11]) + int(after_name[12])) / _TICKS_PER_SECOND if after_name else 0.0


def busy_seconds() -> float:
    """CPU seconds that this machine has spent so far, for anybody (proc(5), stat: without idle, iowait and steal)."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _wait, irq, softirq = map(int, words[:7])
    return (user + nice + system + irq + softirq) / 100


def memory(pid: int) -> dict[str, int]:
    """Resident memory of a process in bytes: ``rss``, and ``pss``, which shares out what is shared. 0 when it ended."""
    fields = dict(line.split(":", 1) for line in _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines()[1:])
    return {name.lower(): int(fields[name].split()[0]) * 1024 if fields else 0 for name in ("Rss", "Pss")}


def file_bytes_read(pid: int) -> int:
    """Bytes that a process has read from files, from the page cache too; sockets do not count (proc(5), io: rchar)."""
    words = _read(Path(f"/proc/{pid}/io")).split()
    return int(words[1]) if words else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
