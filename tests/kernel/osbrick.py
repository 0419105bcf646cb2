"""os-brick, by which Nova reaches volumes, for the Python of guests."""

from __future__ import annotations

import sys
from pathlib import Path

from lab import guest
from lab.kernel.root import Root
from lab.kernel.wheels import built_for
from lab.tools import BUILD, run

VERSION = "7.1.1"


def folder(root: Root) -> Path:
    """A folder with os-brick and all that it needs, installed now if it is not there. Raises CommandFailed."""

    def build(work: Path, made: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, "--target", made, *built_for(root, work), f"os-brick=={VERSION}"])

    return guest.kept(BUILD / "os-brick", f"{VERSION}-{root.image.parent.name}", "os-brick for guests", build)
