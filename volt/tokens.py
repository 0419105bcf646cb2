"""The bearer token: read from a file, never from the command line, compared in constant time."""

from __future__ import annotations

import hmac
import stat
from pathlib import Path

from volt.errors import VoltError


def read_token(path: Path) -> str:
    """The token in a file, without white space around it.

    Raises:
        VoltError: the file is missing, not one line of printable ASCII, or readable by everyone.
    """
    try:
        if path.stat().st_mode & stat.S_IROTH:
            raise VoltError(f"token file {path} is readable by everyone: chmod o-rwx {path}")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise VoltError(f"cannot read token file {path}: {error}") from error
    if not token or not token.isprintable() or " " in token:
        raise VoltError(f"token file {path} must hold one word of printable ASCII")
    return token


def token_matches(header: str | None, token: str) -> bool:
    """Whether an ``Authorization`` header carries the token. Takes the same time for every wrong one of its length."""
    return header is not None and hmac.compare_digest(header.encode(), f"Bearer {token}".encode())
