"""Waits for a VM's login prompt, and looks for I/O errors, in the log of its console."""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from pathlib import Path

from lab.errors import LoginFailed

IO_ERROR = re.compile(rb"I/O error|Buffer I/O|blk_update_request: .*error|EXT4-fs error|critical (medium|target) error")
"""What the guest's kernel says of a disk that failed it (Linux: block/blk-core.c, fs/ext4)."""


def wait_login(vm: str, console_log: Path, timeout: float) -> float:
    """Wait until the console shows the prompt with the VM's own name. Returns the time.monotonic() of that moment.

    Raises LoginFailed with the end of the log after ``timeout`` seconds.
    """
    prompt, deadline, seen = f"{vm} login:".encode(), time.monotonic() + timeout, b""
    # tail awaits changes of the file with inotify.
    tail = subprocess.Popen(
        ["tail", "-F", "-c", "+1", console_log], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert tail.stdout is not None
    try:
        while prompt not in seen:
            ready, _, _ = select.select([tail.stdout], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(tail.stdout.fileno(), 65536) if ready else b""
            if not chunk:
                raise LoginFailed(f"{vm}: no login prompt after {timeout:.0f} s; the console's end: {seen[-500:]!r}")
            seen += chunk
        return time.monotonic()
    finally:
        tail.kill()
        tail.wait()
        tail.stdout.close()


def io_errors(console_log: Path) -> int:
    """Lines of the console that tell of an I/O error."""
    return sum(1 for line in console_log.read_bytes().splitlines() if IO_ERROR.search(line))
