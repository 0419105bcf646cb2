"""Names in caches: files begin with the key of the content that they hold, maps with the name of the image."""

from __future__ import annotations

import re
from pathlib import Path

from drivers.base import Image
from drivers.digests import LONGEST_KEY
from drivers.errors import BadName
from drivers.names import checked

_KEY = re.compile(rf"[0-9A-Za-z]{{1,{LONGEST_KEY}}}", re.ASCII)


def checked_key(key: str) -> str:
    """The key, if it can be a part of a file's name. Raises BadName."""
    if not _KEY.fullmatch(key):
        raise BadName(key)
    return key


def file_of(folder: Path, image: Image, kind: str) -> Path:
    """An image's file of a kind. One content under two names has two: each has a user of its own. Raises BadName."""
    return folder / f"{checked_key(image.key)}-{checked(image.name)}.{kind}"


def key_of(path: Path) -> str:
    """The key that a file is named after."""
    return path.name.partition("-")[0]


def label(image: Image) -> str:
    """What the maps of an image's cache are called, after a prefix of at most 47 bytes (Linux: DM_NAME_LEN is 128).

    Raises BadName.
    """
    return f"{checked(image.name)}-{checked_key(image.key)[:16]}"


def file_bytes(path: Path) -> int:
    """Disk space the file takes, 0 if there is none."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
