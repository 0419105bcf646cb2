"""Whether QEMU reads and writes files by io_uring on this machine.

QEMU may be built without io_uring; the kernel may lack it, refuse it to all or to ordinary users (sysctl
kernel.io_uring_disabled), or a seccomp filter may. So QEMU is asked to open a file that way: this one, since a full
disk has no room for another.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from drivers.errors import CommandFailed, CommandTimedOut, ToolMissing
from drivers.host.command import run

_SETTING = Path("/proc/sys/kernel/io_uring_disabled")  # since Linux 6.6


def usable() -> bool:
    """Whether it works; asked anew when the administrator has changed the setting, or the machine could not answer."""
    try:
        setting = _SETTING.read_text()
    except OSError:
        setting = ""
    try:
        return _works(setting)
    except (OSError, CommandTimedOut, ToolMissing):  # no memory, a busy disk, an upgrade of QEMU: it works without, too
        return False


@functools.cache
def _works(_setting: str) -> bool:
    node = {"driver": "raw", "file": {"driver": "file", "filename": __file__, "aio": "io_uring"}}
    try:
        run(["qemu-img", "info", f"json:{json.dumps(node)}"])
    except CommandFailed:
        return False
    return True
