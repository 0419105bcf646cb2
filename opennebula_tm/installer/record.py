"""What was installed: written before the first change, so that a run that was cut off is ended by the next one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from opennebula_tm.installer import disk
from opennebula_tm.installer.errors import Refused

VERSION = 1


@dataclass
class Record:
    """``files``: digests by path, more than one while they change. ``folders``: made by us. ``edits``: what was added
    to settings files, and ``backups`` of them, both by the file's path. ``created``: settings files that we made.
    ``facts``: what else a part of the installer remembers.
    """

    files: dict[str, list[str]] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    edits: dict[str, list[str]] = field(default_factory=dict)
    backups: dict[str, list[str]] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def knows(self, path: Path, content: bytes) -> bool:
        """Whether the content of this file is ours."""
        return disk.digest(content) in self.files.get(str(path), [])


class Book:
    """Where the record is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Record | None:
        """The record, or None if nothing is installed. Raises Refused."""
        content = disk.read(self.path)
        if content is None:
            return None
        try:
            written = json.loads(content)
            if written.pop("version") != VERSION:
                raise Refused(f"{self.path} is of another release of the installer: use that one")
            return Record(**written)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise Refused(f"{self.path} cannot be read: bring it back from a backup, or move it away") from None

    def write(self, record: Record) -> None:
        """Keep it, privately."""
        owner = disk.owner_of(self.path.parent)
        content = json.dumps({"version": VERSION, **asdict(record)}, indent=1, sort_keys=True) + "\n"
        disk.write(self.path, content.encode(), disk.Owner(owner.uid, owner.gid, 0o600))

    def forget(self) -> None:
        """Nothing is installed any more."""
        disk.drop_draft(self.path)
        self.path.unlink(missing_ok=True)
        disk.sync_folder(self.path.parent)
