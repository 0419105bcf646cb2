"""What a compute host has to remember over a restart, in files that only Nova's user reads: they may have secrets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import nova.conf

CONF = nova.conf.CONF


class Note:
    """One file, written durably, in a folder for each node and ``kind``."""

    def __init__(self, node: str, kind: str, name: str) -> None:
        self.name = name
        self._path = _folder(node, kind) / f"{name}.json"

    def write(self, content: dict[str, Any]) -> None:
        """Remember this instead of what was."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        new.rename(self._path)
        self._sync()

    def read(self) -> dict[str, Any] | None:
        """What is remembered, if anything."""
        try:
            content: dict[str, Any] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return None
        return content

    def remove(self) -> None:
        """Remember nothing."""
        self._path.unlink(missing_ok=True)
        if self._path.parent.exists():
            self._sync()

    def _sync(self) -> None:
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def notes(node: str, kind: str) -> list[Note]:
    """All of a kind."""
    return [Note(node, kind, path.stem) for path in sorted(_folder(node, kind).glob("*.json"))]


def _folder(node: str, kind: str) -> Path:
    return Path(CONF.state_path) / "virtman" / node / kind
