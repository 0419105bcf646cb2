"""What stops the installer. Whoever runs it sees one line."""

from __future__ import annotations


class Refused(Exception):
    """Something is not as the installer needs it; nothing was changed when it is raised while planning."""


class BadSyntax(Refused):
    """A settings file has a form that is not understood, so it is not edited."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(f"line {line}: {what}")
