"""The patch series that there are: for each version of Nova one folder, with a patch for each file that is changed.

``checksums.json`` in it has, by the name of the patch and in the order in which they are applied, the path of the file,
and the SHA-256 of what it holds before and after.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import dropwhile
from pathlib import Path

from openstack_nova_patch.tool.errors import Refused

HERE = Path(__file__).resolve().parents[1] / "series"
LIMIT = 60
"""How many lines of Nova all patches of a series may change, added and removed ones counted."""
CHECKSUMS = "checksums.json"


@dataclass(frozen=True)
class Change:
    """What one patch does. ``file``: of Nova's tree, such as nova/compute/api.py."""

    patch: str
    file: str
    before: str
    after: str

    def place(self, nova: Path) -> Path:
        """Where the file is in this tree."""
        return nova / Path(self.file).relative_to("nova")


@dataclass(frozen=True)
class Series:
    """The patches for one version of Nova, in the order in which they are applied.

    Each may need those before it, so that a Nova that finds only the first few of them works.
    """

    folder: Path
    changes: tuple[Change, ...]

    @property
    def version(self) -> str:
        """Of Nova."""
        return self.folder.name

    def changed_lines(self) -> int:
        """How many lines all patches add and remove."""
        return sum(changed_lines((self.folder / change.patch).read_bytes()) for change in self.changes)


def read(folder: Path) -> Series:
    """The series of one version. Raises Refused."""
    path = folder / CHECKSUMS
    try:
        listed = json.loads(path.read_text())
        return Series(folder, tuple(Change(name, **facts) for name, facts in listed.items()))
    except FileNotFoundError:
        raise Refused(f"{path} is missing: get this repository anew") from None
    except (ValueError, TypeError, AttributeError):
        raise Refused(f"{path} cannot be read: get this repository anew") from None


def read_all(folder: Path = HERE) -> list[Series]:
    """Those of all versions. Raises Refused."""
    return [read(path) for path in sorted(folder.iterdir()) if path.is_dir()]


def write(series: Series) -> None:
    """Write checksums.json."""
    listed = {change.patch: asdict(change) for change in series.changes}
    for facts in listed.values():
        del facts["patch"]
    (series.folder / CHECKSUMS).write_text(json.dumps(listed, indent=2) + "\n")


def changed_lines(patch: bytes) -> int:
    """How many lines a unified diff adds and removes."""
    hunks = dropwhile(lambda line: not line.startswith(b"@@ "), patch.split(b"\n"))
    return sum(line.startswith((b"+", b"-")) for line in hunks)
