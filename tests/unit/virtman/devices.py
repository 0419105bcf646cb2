"""Block devices that tests may open."""

from __future__ import annotations

import os
from pathlib import Path

from testtools import TestCase


def some_device(test: TestCase, but: Path | None = None) -> Path:
    """A block device of this machine that can be opened: a loop device that is over nothing. Nothing is done with it.

    Skips without one.
    """
    usable = [device for device in Path("/dev").glob("loop[0-9]*") if device != but and _usable(device)]
    if not usable:
        test.skipTest("no loop device that this user may open")
    return sorted(usable)[-1]


def _usable(device: Path) -> bool:
    used = Path("/sys/block", device.name, "loop/backing_file").exists()
    return not used and os.access(device, os.R_OK | os.W_OK)
