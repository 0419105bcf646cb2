"""What can go wrong in a benchmark."""

from __future__ import annotations


class BenchmarkError(Exception):
    """Base of all; the message is one line for people."""


class ToolMissing(BenchmarkError):
    """``tool`` is in Debian package ``package``."""

    def __init__(self, tool: str, package: str) -> None:
        super().__init__(f"{tool} is missing: install Debian package {package}")


class BadImage(BenchmarkError):
    """The image cannot be used as it is."""


class BadTrace(BenchmarkError):
    """A trace file cannot be read, or belongs to another image."""


class BootFailed(BenchmarkError):
    """The recorded VM did not come to its login prompt."""


class DiskFailed(BenchmarkError):
    """A disk cannot be opened, or a read or write of it failed."""


class WrongBytes(BenchmarkError):
    """A disk gave other bytes than the image has."""


class Failed(BenchmarkError):
    """The measurement ended, and found something that must not be."""


class NoRoom(BenchmarkError):
    """The disk has not the room that the measurement needs."""


class NotBelow(BenchmarkError):
    """A host came to another place in the tree than the benchmark needs."""


class TookTooLong(BenchmarkError):
    """A phase passed its time limit."""
