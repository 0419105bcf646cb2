"""What a driver needs of the machine, and whether it is there.

A driver class says it in its attribute ``needs``, next to the code that uses it. Debian's name of a package is part of
a need, so that the doctor can say how to install what is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drivers.errors import DriverError
from drivers.host.command import beside_python, run

_DEBIAN_PYTHON = "/usr/lib/python3/dist-packages"
_OTHER_KERNEL = "boot a kernel that has the missing modules, such as Debian's"
_SBIN = ("/usr/sbin", "/sbin")
"""Where administration tools are, which an ordinary user's PATH does not name."""


@dataclass(frozen=True)
class Tool:
    """A program, and Debian's package that has it; for one without a package, ``remedy`` says what to do."""

    name: str
    package: str | None
    remedy: str | None = None


@dataclass(frozen=True)
class Library:
    """A Python module, Debian's package that has it, and its name on PyPI."""

    module: str
    package: str
    pypi: str


@dataclass(frozen=True)
class Node:
    """A path that the kernel offers when ``module`` is loaded; ``mount``: of a file system, which type."""

    path: Path
    module: str
    mount: str = ""


@dataclass(frozen=True)
class Needs:
    """``modules``: of the kernel, loaded, built in or to be loaded. ``address``: ``Place.address``.

    What the kernel can give need not be there before the first use: see ``provide``.
    """

    tools: tuple[Tool, ...] = ()
    modules: tuple[str, ...] = ()
    libraries: tuple[Library, ...] = ()
    nodes: tuple[Node, ...] = ()
    root: bool = False
    address: bool = False


@dataclass(frozen=True)
class Finding:
    """One need and whether it is met. If not: ``package`` is Debian's that helps, else ``remedy`` says what to do."""

    need: str
    met: bool
    package: str | None = None
    remedy: str | None = None


DMSETUP = Tool("dmsetup", "dmsetup")
LOSETUP = Tool("losetup", "mount")
MODPROBE = Tool("modprobe", "kmod")
MOUNT = Tool("mount", "mount")
UDEVADM = Tool("udevadm", "udev")
QEMU_IMG = Tool("qemu-img", "qemu-utils")
QEMU_STORAGE_DAEMON = Tool("qemu-storage-daemon", "qemu-system-common")
VIRTMAN_CHUNKD = Tool(
    "virtman-chunkd", None, "for virtman-chunkd install Rust 1.85 or newer, then VirtMan again: docs/operations.md"
)

DEVICE_MAPPER = Node(Path("/dev/mapper/control"), "dm_mod")
LOOP = Node(Path("/dev/loop-control"), "loop")
CONFIGFS = Node(Path("/sys/kernel/config"), "configfs", mount="configfs")

_MODULES = Path("/sys/module")
_providing = threading.Lock()


class Machine:
    """This machine, as far as drivers ask for it."""

    @property
    def root(self) -> bool:
        """Whether this process may do what root may."""
        return os.geteuid() == 0

    @property
    def kernel(self) -> str:
        """Its release, as uname(1) prints it."""
        return os.uname().release

    @property
    def debian_python(self) -> bool:
        """Whether this Python sees the libraries of Debian's packages: a virtual environment usually does not."""
        return _DEBIAN_PYTHON in sys.path

    def has_tool(self, name: str) -> bool:
        return bool(beside_python(name) or _which(name))

    def has_library(self, module: str) -> bool:
        return importlib.util.find_spec(module) is not None

    def has_module(self, name: str) -> bool:
        """Whether the kernel has the module, or would load it (modprobe(8) knows the built-in ones, too)."""
        if (_MODULES / name).exists():
            return True
        modprobe = _which(MODPROBE.name)
        if modprobe is None:
            return False
        try:
            run([modprobe, "--dry-run", "--quiet", name])
        except DriverError:
            return False
        return True

    @property
    def lvm_filter(self) -> str | None:
        """Which devices LVM looks at by its settings (lvm.conf(5), global_filter); None where it is not installed."""
        lvmconfig = _which("lvmconfig")
        if lvmconfig is None:
            return None
        try:
            return run([lvmconfig, "devices/global_filter"]).stdout
        except DriverError:  # nothing is set, or the settings cannot be read
            return ""

    def has_node(self, node: Node) -> bool:
        """Whether the path is there, and something is mounted on it if that is asked for."""
        return node.path.is_mount() if node.mount else node.path.exists()


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=os.pathsep.join([*os.get_exec_path(), *_SBIN]))


def provide(needs: Needs) -> None:
    """Have the kernel give what a driver needs of it: load the modules that are not there, mount what is not mounted.

    Raises DriverError.
    """
    machine = Machine()
    with _providing:
        for module in needs.modules:
            _load(module)
        for node in needs.nodes:
            if not machine.has_node(node):
                _make(node, machine)


def _load(module: str) -> None:
    if (_MODULES / module).exists():
        return
    try:
        run([_which(MODPROBE.name) or MODPROBE.name, module])  # it knows those that are a part of the kernel
    except DriverError as error:
        raise DriverError(f"the kernel module {module} is needed: {error}") from error


def _make(node: Node, machine: Machine) -> None:
    _load(node.module)
    if node.mount and not machine.has_node(node):
        run(["mount", "-t", node.mount, node.mount, str(node.path)])
    if not machine.has_node(node):
        raise DriverError(f"the kernel module {node.module} is loaded, but there is no {node.path}")


def check(needs: Needs, machine: Machine, address: str) -> list[Finding]:
    """Every need, and whether ``machine`` meets it; ``address`` as in ``Place``."""
    return list(_findings(needs, machine, address))


def _findings(needs: Needs, machine: Machine, address: str) -> Iterator[Finding]:
    if needs.root:
        yield Finding("root", machine.root, remedy="run as root")
    for tool in needs.tools:
        yield Finding(tool.name, machine.has_tool(tool.name), package=tool.package, remedy=tool.remedy)
    for library in needs.libraries:
        yield _library(library, machine)
    for module in needs.modules:
        yield Finding(f"module {module}", machine.has_module(module), remedy=_OTHER_KERNEL)
    for node in needs.nodes:
        there = machine.has_node(node) or machine.has_module(node.module)
        yield Finding(str(node.path), there, remedy=_OTHER_KERNEL)
    if needs.address:
        yield Finding("address", bool(address), remedy="say with --address where other hosts reach this one")


def _library(library: Library, machine: Machine) -> Finding:
    need, met = f"Python library {library.module}", machine.has_library(library.module)
    if machine.debian_python:
        return Finding(need, met, package=library.package)
    return Finding(need, met, remedy=f"{sys.executable} -m pip install {library.pypi}")
