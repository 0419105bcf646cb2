"""Which names VMs, images and hosts may have, which become parts of paths, URLs, domains and targets; and paths."""

from __future__ import annotations

import re
from pathlib import Path

from virtman.errors import BadRequest

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"

TEMPORARY = "temporary-"
"""Begins the names of the agent's own snapshots, which no other has."""
TRAVELLING = "virtman-migration-"
"""How the names begin of the snapshots that a VM is moved by (virtman/moving.py)."""

PATH_PATTERN = r"^/[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*$"
"""An absolute path that fits into one line, as POSIX knows it: two slashes at the start may mean something else."""


def check_name(what: str, name: str) -> str:
    """The name, if it is allowed. Raises BadRequest."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise BadRequest(
            f"{what} name {_shown(name)}: 1 to 63 letters, digits, '-' and '_' are allowed, the first a letter or digit"
        )
    return name


def check_location(text: str) -> str:
    """A host's site and rack, if it is allowed. Raises BadRequest."""
    parts = text.split("/")
    if text and (len(parts) > 2 or not all(re.fullmatch(NAME_PATTERN, part) for part in parts)):
        raise BadRequest(
            f"place {_shown(text)}: a site, or a site and a rack as in paris/r12, is allowed, each of 1 to 63 letters,"
            " digits, '-' and '_', the first a letter or digit"
        )
    return text


def check_path(path: Path) -> str:
    """The path as text, if it is allowed and UTF-8. Raises BadRequest."""
    text = str(path)
    if not re.fullmatch(PATH_PATTERN, text) or text != text.encode(errors="replace").decode():
        raise BadRequest(f"path {_shown(text)}: it must be absolute, in UTF-8, and without control characters")
    return text


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
