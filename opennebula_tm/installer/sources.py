"""What this version would install: the files of opennebula_tm, and where each goes below the remotes folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from opennebula_tm.installer.errors import Refused

PACKAGE = Path(__file__).resolve().parents[1]
IGNORED = ("__pycache__",)
LIBRARY = Path("tm/virtman/opennebula_tm")
PROBES = (Path("im/kvm-probes.d"), Path("im/qemu-probes.d"))
"""Hosts of both kinds run the same probes; some trees have a link for the second."""


def files(package: Path = PACKAGE) -> Iterator[tuple[Path, Path]]:
    """Each file, and its path below the remotes folder. Raises Refused if this is not a whole copy of the project."""
    remotes = package / "remotes"
    if not (remotes / "tm" / "virtman").is_dir() or not (package / "driver").is_dir():
        raise Refused(f"{package} is not whole: it should have driver and remotes/tm/virtman")
    yield package / "__init__.py", LIBRARY / "__init__.py"
    for path in _below(package / "driver"):
        yield path, LIBRARY / path.relative_to(package)
    for path in _below(remotes):
        below = path.relative_to(remotes)
        yield path, below
        if below.is_relative_to(PROBES[0]):
            yield path, PROBES[1] / below.relative_to(PROBES[0])


def _below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not set(path.parts) & set(IGNORED):
            yield path
