"""The agent's settings, and the folders made of them."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
from dataclasses import dataclass
from pathlib import Path

from drivers.base import FAILOVER, Place
from virtman.errors import BadRequest, ConfigError, StateLocked
from virtman.names import check_name
from virtman.places import SOCKET, is_ours
from virtman.stackchoice import Drivers, settle

SOCKET_PATH_MAX = 107
"""unix(7): sun_path has 108 bytes with its terminating zero."""
LONGEST_SOCKET = len("/parent/") + 63 + len(".sock.new")
LIBVIRT_GROUP = "libvirt-qemu"


@dataclass(frozen=True)
class AgentConfig:
    """``idle_grace``: seconds that a stack nobody needs is kept. ``address``, ``path_policy``: see ``Place``."""

    name: str
    state: Path
    run: Path
    volt: str
    volt_token_file: Path | None = None
    libvirt: str = "qemu:///system"
    accel: str = "auto"
    probe_kernel: Path | None = None
    idle_grace: float = 600.0
    attach: str = "nbd"
    cache: str = "qcow2"
    export: str = "nbd"
    snapshot: str = "qcow2"
    address: str = ""
    path_policy: str = FAILOVER

    @property
    def drivers(self) -> Drivers:
        """The driver of each layer."""
        return Drivers(self.attach, self.cache, self.export, self.snapshot)

    @property
    def place(self) -> Place:
        """What the drivers are told."""
        return Place(self.state, self.run, self.name, self.address, self.path_policy)

    @property
    def socket(self) -> Path:
        """The socket of the local API."""
        return self.run / SOCKET


def prepare(config: AgentConfig) -> list[int]:
    """Check the settings, make the folders, lock them for this process and keep there which drivers use them.

    Returns the locks, to be kept open.

    Raises ConfigError, StateLocked.
    """
    try:
        check_name("host", config.name)
    except BadRequest as error:
        raise ConfigError(f"{error}; give one with --name") from None
    for folder in (config.state, config.run):
        if not folder.is_absolute():
            raise ConfigError(f"{str(folder)!r} must be an absolute path")
    if config.state == config.run:
        raise ConfigError(f"{config.state} cannot be both the state and the run folder")
    room = SOCKET_PATH_MAX - LONGEST_SOCKET
    if len(os.fsencode(config.run)) > room:
        raise ConfigError(f"the run folder {config.run} is too long for unix sockets: at most {room} bytes")
    try:
        # The user that the host's libvirt runs QEMU as may pass through to the files of its VM, and list nothing.
        mode = 0o711 if os.geteuid() == 0 else 0o700
        folders = (config.state, config.run, config.state / "snapshots", config.state / "machines")
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        if not is_ours(config.run):
            raise ConfigError(f"the run folder {config.run} belongs to somebody else: say another one with --run")
        for folder in folders:
            folder.chmod(mode)
        serve_to_hypervisor(config.run / "serve")
        return _hold(config)
    except OSError as error:
        raise ConfigError(f"cannot use {error.filename}: {error.strerror}") from error


def serve_to_hypervisor(folder: Path) -> None:
    """Let QEMU, which libvirt runs as a user of its own, connect to the sockets in ``folder``, and nobody else."""
    folder.mkdir(exist_ok=True, mode=0o700)
    try:
        group = grp.getgrnam(LIBVIRT_GROUP).gr_gid
    except KeyError:
        return
    if os.geteuid() == 0:
        os.chown(folder, 0, group)
        folder.chmod(0o710)


def _hold(config: AgentConfig) -> list[int]:
    with contextlib.ExitStack() as undo:
        locks = []
        for folder in (config.state, config.run):
            locks.append(_lock(folder / "lock"))
            undo.callback(os.close, locks[-1])
        settle(config.state, config.drivers)
        undo.pop_all()
    return locks


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StateLocked(f"another agent is running on {path.parent}") from None
    return fd
