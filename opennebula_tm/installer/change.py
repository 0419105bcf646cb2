"""Changes to settings files and to files of our own: planned, shown, and then made, each whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from opennebula_tm.installer import disk
from opennebula_tm.installer.console import Console
from opennebula_tm.installer.errors import Refused
from opennebula_tm.installer.record import Book, Record

Step = Callable[[str], None]
"""Called with the name of a step before it is done; tests end the run in it."""


def no_step(_name: str) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class Edit:
    """A settings file that is to have another text, or to go (``new`` None). ``owner``: of it, or of what is made."""

    path: Path
    old: str | None
    new: str | None
    owner: disk.Owner

    @property
    def changes(self) -> bool:
        return self.old != self.new


@dataclass(frozen=True)
class OwnFile:
    """A file of ours. ``setting``: what the administrator writes there stays."""

    path: Path
    content: bytes
    owner: disk.Owner
    setting: bool = False


def read_text(path: Path, edit: Callable[[str], str]) -> Edit | None:
    """The edit of this file, or None if there is no such file. Raises Refused with its name."""
    content = disk.read(path)
    if content is None:
        return None
    old = disk.as_text(content)
    try:
        return Edit(path, old, edit(old), disk.owner_of(path))
    except Refused as error:
        raise Refused(f"{path}: {error}") from None


def refuse_foreign(files: Iterable[OwnFile], record: Record) -> None:
    """Raise Refused if a file stands in the place of one of ours that is not ours, or was changed by somebody."""
    for file in files:
        if file.path.is_symlink() or (file.path.exists() and not file.path.is_file()):
            raise Refused(f"{file.path} is not a file of this installer: move it away")
        present = disk.read(file.path)
        if present is None or file.setting or present == file.content or record.knows(file.path, present):
            continue
        whose = "was changed since it was installed" if str(file.path) in record.files else "is not of this installer"
        raise Refused(f"{file.path} {whose}: move it away")


def stale(file: OwnFile, record: Record) -> bool:
    """Whether this file is to be written. A setting that the administrator changed is not."""
    present = disk.read(file.path)
    if present is None:
        return True
    if file.setting and present != file.content:
        return record.knows(file.path, present)
    return present != file.content or disk.owner_of(file.path) != file.owner


def show(console: Console, edits: Iterable[Edit]) -> None:
    """The differences of all edits."""
    for edit in edits:
        if edit.changes:
            console.diff(edit.path, edit.old or "", edit.new or "")


def apply(edits: Iterable[Edit], record: Record, book: Book, step: Step) -> None:
    """Write the settings files, each after a backup that is as private as the file."""
    for edit in edits:
        disk.drop_draft(edit.path)
        if not edit.changes:
            continue
        if edit.old is not None and not _kept(edit, record):
            backup = disk.backup_name(edit.path)
            record.backups.setdefault(str(edit.path), []).append(str(backup))
            book.write(record)
            step(f"back up {edit.path}")
            disk.write(backup, disk.as_bytes(edit.old), edit.owner)
        step(f"write {edit.path}")
        if edit.new is None:
            edit.path.unlink(missing_ok=True)
        else:
            disk.write(edit.path, disk.as_bytes(edit.new), edit.owner)


def _kept(edit: Edit, record: Record) -> bool:
    """Whether a backup has what the file holds, or the file is about to be again what a backup has: nothing is lost."""
    contents = [disk.read(Path(name)) for name in record.backups.get(str(edit.path), [])]
    return any(content in (_bytes(edit.old), _bytes(edit.new)) for content in contents if content is not None)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else disk.as_bytes(text)


def drop_backups(record: Record) -> list[str]:
    """Remove the backups of files that are what they were. Returns the names of the others."""
    left: list[str] = []
    for name, backups in record.backups.items():
        kept = [disk.read(Path(backup)) for backup in backups]
        present = disk.read(Path(name))
        if present in kept if present is not None else name in record.created:
            for backup in map(Path, backups):
                disk.drop_draft(backup)
                backup.unlink(missing_ok=True)
        else:
            left += [backup for backup, content in zip(backups, kept, strict=True) if content is not None]
    return left
