"""Loop devices as udev finds them."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path

LOOP_CTL_REMOVE = 0x4C81
"""Linux: linux/loop.h."""


def remove_unused() -> None:
    """Have the next ones be new."""
    with Path("/dev/loop-control").open("rb", buffering=0) as control:
        for device in Path("/sys/block").glob("loop*"):
            with contextlib.suppress(OSError):  # it is in use
                fcntl.ioctl(control, LOOP_CTL_REMOVE, int(device.name.removeprefix("loop")))
