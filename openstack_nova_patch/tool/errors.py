"""What stops the tool. Whoever runs it sees one line."""

from __future__ import annotations


class Refused(Exception):
    """Something is not as the tool needs it; nothing was changed when it is raised before the first file is put."""


class Unfit(Refused):
    """This Nova is none that a series was made for, or somebody changed a file that the series changes."""


def one_line(error: OSError) -> str:
    """An OSError for people: the file, and what is wrong with it."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
