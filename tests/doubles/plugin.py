"""The doubles as drivers of another package, so that an agent finds them by name.

``double`` is there in every layer; the cache ``group`` has volumes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from testtools import TestCase

ENTRY_POINTS = "".join(
    f"[virtman.drivers.{layer}]\ndouble = tests.doubles.drivers:{layer.capitalize()}Double\n"
    for layer in ("attach", "export", "snapshot", "cache")
)
ENTRY_POINTS += "group = tests.doubles.drivers:CacheGroupDouble\n"


def install_doubles(test: TestCase, folder: Path) -> None:
    """What pip does to install a package of drivers: a dist-info folder on the path that Python imports from."""
    info = folder / "doubles-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: doubles\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    sys.path.append(str(folder))
    test.addCleanup(sys.path.remove, str(folder))
