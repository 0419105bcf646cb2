"""What can go wrong in a driver."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a full file system, or a used up quota, answers."""


class DriverError(Exception):
    """Any failure of a driver."""


class UnknownDriver(DriverError):
    """No driver of that name is installed for the layer."""

    def __init__(self, layer: str, name: str, known: Iterable[str]) -> None:
        there = ", ".join(sorted(known)) or "none at all (is the package installed?)"
        super().__init__(f"there is no {layer} driver called {name!r}; installed: {there}")


class ToolMissing(DriverError):
    """A program that the driver needs is not installed."""

    def __init__(self, tool: str) -> None:
        super().__init__(f"the program {tool} is not installed or not in PATH")
        self.tool = tool


def _program(argv: Sequence[str]) -> str:
    """A program and what it was to do, for people; the log has the whole (drivers/host/command.py)."""
    words = argv[3:] if argv[0].endswith("setpriv") else argv
    return " ".join(word for word in words[:2] if word == words[0] or word.isalpha())


class CommandFailed(DriverError):
    """A program ended with another exit code than 0."""

    def __init__(self, argv: Sequence[str], code: int, stdout: str, stderr: str) -> None:
        said = (stderr.strip() or stdout.strip() or "it said nothing").splitlines()[-1]
        super().__init__(f"{_program(argv)} ended with exit code {code}: {said}")
        self.argv, self.code, self.stdout, self.stderr = tuple(argv), code, stdout, stderr


class CommandTimedOut(DriverError):
    """A program did not end within ``timeout`` seconds and was killed."""

    def __init__(self, argv: Sequence[str], timeout: float, stdout: str, stderr: str) -> None:
        super().__init__(f"{_program(argv)} did not end within {timeout:g} s")
        self.argv, self.timeout, self.stdout, self.stderr = tuple(argv), timeout, stdout, stderr


class TargetFailed(DriverError):
    """The kernel's iSCSI target refused a change."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(f"the kernel's iSCSI target: {reason}")


class NbdFailed(DriverError):
    """An NBD server hung up, gave no answer in time, refused the export, or speaks something else than NBD."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the NBD server: {why}")


class BadName(DriverError):
    """A name that could leave its folder or confuse a tool."""

    def __init__(self, name: str) -> None:
        shown = name if len(name) <= 80 else f"{name[:80]}…"
        super().__init__(f"bad name {shown!r}: 1 to 63 letters, digits, '-' and '_', beginning with a letter or digit")


class BadAddress(DriverError):
    """A parent's address that this driver cannot reach."""


class BadDevice(DriverError):
    """The layer below handed over something this driver cannot build on."""


class DeviceRefused(DriverError):
    """A device that cannot be read through the cache; the message says why, and not which."""


class BadDisk(DriverError):
    """A disk of an impossible size, or a file that is not the disk it should be."""


class BadVolume(DriverError):
    """A file or device that cannot be, or is no longer, a volume of the cache."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is not taken as a volume of the cache: {why}")


class NoParents(DriverError):
    """An empty list of parents, or ``why`` none of them can be read from."""

    def __init__(self, image: str, why: str = "") -> None:
        super().__init__(f"image {image} has no parent to read from{why and ': '}{why}")


class NotAttached(DriverError):
    """The image has no route on this host."""

    def __init__(self, image: str) -> None:
        super().__init__(f"image {image} is not attached on this host")


class NoSpace(DriverError):
    """The file system is too full."""

    def __init__(self, path: Path, free: int, needed: int, how: str = "free") -> None:
        super().__init__(f"no room for {path}: {free} bytes {how}, {needed} needed")


class DiskFull(NoSpace):
    """A write met the full file system, or the end of somebody's quota."""

    def __init__(self, error: OSError) -> None:
        DriverError.__init__(self, str(error))


class HostFailed(DriverError):
    """The machine refused: no more open files, no memory, no right, a disk that fails. ``errno`` as of the OSError."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error) or type(error).__name__)
        self.errno = error.errno


class NotReleased(DriverError):
    """The kernel did not finish a change of a device in time."""

    def __init__(self, what: str, timeout: float) -> None:
        super().__init__(f"the kernel did not finish with the {what} within {timeout:g} s")


class NotOurs(DriverError):
    """A map of this name was made for another state folder, or by somebody else; nothing was changed."""

    def __init__(self, name: str, whose: str) -> None:
        super().__init__(
            f"{name} on this machine is not of this agent's state folder, but {whose}: "
            "start the agent with that folder, or, if it is lost, reboot"
        )


class InUse(DriverError):
    """The file is open in a cache."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is in use by the cache of an image")


class DeviceInUse(DriverError):
    """Somebody has open what was handed out for a device."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is open, by a VM perhaps; take it away from there first, or use --force")


class VolumeInUse(DriverError):
    """Devices of somebody else are attached to a volume of the cache."""

    def __init__(self, path: Path, devices: Sequence[str]) -> None:
        super().__init__(
            f"devices that are not of this agent are attached to the cache volume {path}: {', '.join(devices)};"
            " detach each first (as root: echo 1 > /sys/class/block/NAME/bcache/detach)"
        )


class VmDiskMissing(DriverError):
    """The VM has no disk on this host."""

    def __init__(self, vm: str) -> None:
        super().__init__(f"VM {vm} has no disk on this host")


class DiskInUse(DriverError):
    """Another program has the VM's disk open: somebody's QEMU, or one that copies it."""

    def __init__(self, vm: str) -> None:
        super().__init__(
            f"VM {vm}: its disk is open in a QEMU that VirtMan did not start, or is being copied; end that first"
        )


class SnapshotMissing(DriverError):
    """The disk has no snapshot of this name."""

    def __init__(self, vm: str, snapshot: str) -> None:
        super().__init__(f"the disk of VM {vm} has no snapshot {snapshot!r}")


class MonitorFailed(DriverError):
    """QEMU refused a command, or did not answer. ``kind`` is QMP's error class, empty if there was no answer."""

    def __init__(self, command: str, why: str, kind: str = "") -> None:
        super().__init__(f"QEMU's monitor: {command}: {why}")
        self.command, self.why, self.kind = command, why, kind


class NotPossible(DriverError):
    """The driver cannot do this with its disks; the message says what, and which driver can."""
