"""What can go wrong in the lab."""

from __future__ import annotations

from collections.abc import Sequence


class LabError(Exception):
    """Base of all errors of the lab."""


class CommandFailed(LabError):
    """A tool ended with another exit code than 0; the message has the last lines of its ``output``."""

    def __init__(self, argv: Sequence[str], code: int, output: str) -> None:
        self.argv = tuple(argv)
        self.code = code
        self.output = output
        tail = "\n".join(output.strip().splitlines()[-10:])
        super().__init__(f"{argv[0]} ended with exit code {code}: {' '.join(argv)}\n{tail}")


class NoPackageSources(LabError):
    """The machine's apt knows no sources of the Debian release to build the guest from."""


class NotReady(LabError):
    """Something that was started did not answer in time, or ended before it did."""


class LoginFailed(LabError):
    """A VM did not reach its login prompt."""


class ConsoleFailed(LabError):
    """A command in a VM failed, or its guest does not answer on the serial port."""


class Leftovers(LabError):
    """Something outlived its cluster: processes, sockets, mounts."""


class NoNetwork(LabError):
    """This machine gives the lab no network of its own; the message has the last line of what a tool said."""

    def __init__(self, said: str) -> None:
        super().__init__(f"no network namespaces here: {said}")
