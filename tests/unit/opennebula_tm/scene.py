"""A front end and a copy of the project that are small enough to compare byte by byte."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from opennebula_tm.installer.console import Commands, Console, Done
from opennebula_tm.installer.frontend import FrontEnd, Places

ONED = """\
# Settings of a front end
LOG = [
  SYSTEM      = "file",
  DEBUG_LEVEL = 3
]
PORT = 2633   # a comment, with a comma and a "quote

MAX_ACTIONS_PER_HOST = 4
EMPTY =
VNC_PORTS = [
    START    = 5900,
    RESERVED = "32768:65536"
    # RESERVED = "6800, 6801"
]

#TM_MAD = [ EXECUTABLE = "one_tm", ARGUMENTS = "-t 1 -d none" ]
VM_MAD = [
    NAME = "kvm",   # of KVM
    EXECUTABLE = "one_vmm_exec",
    ARGUMENTS = "-t 15 -r 0 kvm -p",
    TYPE = "kvm" ]
VM_MAD = [ NAME = "lxc", EXECUTABLE = "one_vmm_exec", ARGUMENTS = "-t 7 -r 0 lxc" ]
TM_MAD = [
    EXECUTABLE = "one_tm",  \t
    ARGUMENTS = "-t 15 -d dummy,shared,ssh,local"
]
DATASTORE_MAD = [
    EXECUTABLE = "one_datastore",

    ARGUMENTS  = "-t 15 -d dummy,fs -s shared,ssh,local -w 60"
]
VM_ADMIN_OPERATIONS  = "migrate, delete,
    backup, say \\"it\\""
TM_MAD_CONF = [
    NAME = "shared", LN_TARGET = "NONE", CLONE_TARGET = "SYSTEM", SHARED = "YES"
]
TM_MAD_CONF = [ name = "ssh", LN_TARGET = "SYSTEM", CLONE_TARGET = "SYSTEM", SHARED = "NO" ]   # the last one

# Datastores
DS_MAD_CONF = [
    NAME = "fs", REQUIRED_ATTRS = "", PERSISTENT_ONLY = "NO",
    MARKETPLACE_ACTIONS = "export"
]
INHERIT_DATASTORE_ATTR = "DISK_TYPE"
TM_MAD_CONF_X = "no such thing"
"""
EXECRC = """\
# pairs
#LIVE_DISK_SNAPSHOTS="kvm-none"
LIVE_DISK_SNAPSHOTS="kvm-qcow2 kvm-ssh"

VNMAD_LOCAL_ACTIONS="elastic-post"
"""
PROBE = "im/kvm-probes.d/host/system/virtman.sh"


def write(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """A file with all folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)


def front_end(location: Path, oned: str | bytes = ONED) -> Places:
    """A front end with drivers of others."""
    places = Places.of(location)
    write(places.oned, oned, 0o640)
    write(places.execrc, EXECRC)
    for name in ("tm/ssh/clone", "datastore/fs/cp", PROBE.replace("virtman", "name")):
        write(places.remotes / name, "#!/bin/sh\nexit 0\n", 0o755)
    write(places.remotes / "im/qemu-probes.d/host/system/name.sh", "#!/bin/sh\n", 0o755)
    write(places.remotes / "etc/tm/ssh/sshrc", "X=1\n")
    places.remotes.chmod(0o750)
    return places


def copy_of_project(folder: Path) -> Path:
    """The package opennebula_tm, small."""
    package = folder / "opennebula_tm"
    write(package / "__init__.py", '"""Drivers."""\n')
    write(package / "driver/__init__.py", "")
    write(package / "driver/main.py", "def main() -> None: ...\n")
    write(package / "driver/__pycache__/main.cpython-311.pyc", b"\0")
    for name in ("tm/virtman/clone", "tm/virtman/ln", "datastore/virtman/cp", PROBE):
        write(package / "remotes" / name, f"#!/bin/sh\n# {name}\n", 0o644)
    write(package / "remotes/tm/virtman/run.py", "# run\n")
    write(package / "remotes/etc/tm/virtman/virtman.conf", "# SOCKET=/run\n")
    return package


def tree(folder: Path) -> dict[str, tuple[int, bytes | str]]:
    """Everything below the folder: permissions and content."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for parent, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(parent) / name
            mode = stat.S_IMODE(path.lstat().st_mode)
            content: bytes | str = "folder" if path.is_dir() else path.read_bytes()
            found[str(path.relative_to(folder))] = (mode, str(path.readlink()) if path.is_symlink() else content)
    return found


class CommandsDouble(Commands):
    """Answers instead of programs. ``asked``: what was to be run."""

    def __init__(self, *answers: Done) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []

    def run(self, argv: Sequence[str]) -> Done:
        """The next answer; the last one stays. Without answers no program is installed."""
        self.asked.append(list(argv))
        if not self.answers:
            return Done(None, error=f"{argv[0]} is not installed")
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Cut(BaseException):
    """The installer is killed here."""


class CutAt:
    """Kills the installer before the step of this number. ``seen``: the steps."""

    def __init__(self, number: int | None = None) -> None:
        self.number = number
        self.seen: list[str] = []

    def __call__(self, name: str) -> None:
        self.seen.append(name)
        if len(self.seen) - 1 == self.number:
            raise Cut(name)


def was_cut(number: int, act: Callable[..., object], *arguments: object) -> bool:
    """Kill an act before the step of this number. Returns false if it has no such step, and has ended well."""
    try:
        act(*arguments, CutAt(number))
    except Cut:
        return True
    return False


class Terminal(io.StringIO):
    """A terminal at which this is typed."""

    def isatty(self) -> bool:
        return True


class Scene:
    """A front end, a copy of the project, and what the installer said."""

    def __init__(self, folder: Path, oned: str | bytes = ONED) -> None:
        self.location = folder / "one"
        self.places = front_end(self.location, oned)
        self.package = copy_of_project(folder / "project")
        self.commands = CommandsDouble()
        self.out = io.StringIO()

    def front(self, step: CutAt | None = None) -> FrontEnd:
        """The installer, to whom all is agreed."""
        console = Console(True, out=self.out)
        return FrontEnd(self.places, console, self.commands, self.package, step or CutAt())

    def run(self, act: str, step: CutAt | None = None) -> None:
        """Install or remove."""
        front = self.front(step)
        front.install(None) if act == "install" else front.remove(force=False)

    def tree(self) -> dict[str, tuple[int, bytes | str]]:
        """All of the front end."""
        return tree(self.location)

    def oned(self) -> str:
        """What oned.conf holds."""
        return self.places.oned.read_bytes().decode()

    def edit_oned(self, old: str, new: str) -> None:
        """An administrator changes it."""
        self.places.oned.write_bytes(self.oned().replace(old, new).encode())
