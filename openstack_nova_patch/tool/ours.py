"""Our modules, and the folder of Nova's tree where they are put: nova/virtman."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openstack_nova_patch.tool import disk

HERE = Path(__file__).resolve().parents[1] / "modules"
NAME = "virtman"
COMPILED = "__pycache__"


@dataclass(frozen=True)
class Ours:
    """The modules of ``source`` for the tree ``nova``."""

    nova: Path
    source: Path = HERE

    @property
    def folder(self) -> Path:
        """Where they are put."""
        return self.nova / NAME

    def files(self) -> list[disk.NewFile]:
        """All of them, as they are to be in Nova's tree: they belong to whom Nova's own belong."""
        owner = disk.owner_of(self.nova / "__init__.py")
        paths = sorted(path for path in self.source.rglob("*.py") if path.is_file())
        return [disk.NewFile(self.folder / path.relative_to(self.source), path.read_bytes(), owner) for path in paths]

    def folders(self) -> list[Path]:
        """The folders that they need; a parent comes before what is in it."""
        return sorted({file.path.parent for file in self.files()} | {self.folder})

    def foreign(self) -> Path | None:
        """Something in our folder's place that is not ours, or None."""
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            return self.folder
        return next((path for path in self._present() if not _may_be_ours(path)), None)

    def stale(self) -> list[disk.NewFile]:
        """Those that are not there as they are to be."""
        return [file for file in self.files() if not _same(file)]

    def superfluous(self) -> list[Path]:
        """Modules in our folder that another version put there."""
        wanted = {file.path for file in self.files()}
        return [path for path in self._present() if path.suffix == ".py" and path not in wanted]

    def drafts(self) -> list[Path]:
        """What a run that was killed left in our folder."""
        return [path for path in self._present() if path.name.endswith(disk.DRAFT)]

    def present(self) -> bool:
        """Whether there is anything in our folder's place."""
        return self.folder.exists()

    def _present(self) -> Iterator[Path]:
        """All files in our folder but what Python compiled."""
        if self.folder.is_dir():
            for path in sorted(self.folder.rglob("*")):
                if COMPILED not in path.parts[len(self.folder.parts) :] and (path.is_symlink() or not path.is_dir()):
                    yield path

    def remove(self, step: disk.Step = disk.no_step) -> None:
        """Remove our folder with all that is in it; half of it may be gone."""
        step(f"remove {self.folder}")
        if self.folder.exists():
            shutil.rmtree(self.folder)
            disk.sync_folder(self.nova)


def _may_be_ours(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and (path.suffix == ".py" or path.name.endswith(disk.DRAFT))


def _same(file: disk.NewFile) -> bool:
    return file.path.is_file() and file.path.read_bytes() == file.content
