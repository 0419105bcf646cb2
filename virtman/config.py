"""The agent's settings, and the folders made of them."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from drivers.base import FAILOVER, Limits, Place
from drivers.host.acl import let_pass
from drivers.host.durable import write_atomically
from virtman.errors import BadRequest, ConfigError
from virtman.names import check_location, check_name
from virtman.places import SOCKET, is_ours
from virtman.stackchoice import Drivers, keep_address, settle
from virtman.stateversion import mark

SOCKET_PATH_MAX = 107
"""unix(7): sun_path has 108 bytes with its terminating zero."""
LONGEST_SOCKET = len("/serve/") + 63 + len(".sock")
LIBVIRT_GROUP = "libvirt-qemu"


@dataclass(frozen=True)
class AgentConfig:
    """``idle_grace``: seconds that a stack nobody needs is kept. ``group``: whose members may call the agent, and use
    the disks of VMs. ``address``, ``port``, ``path_policy``, ``reserve``, ``cache_limit``: see ``Place``; ``up``,
    ``down``, ``connections``: see ``Limits``. ``location``: the host's site and rack, ``SITE/RACK`` or ``SITE``.
    """

    name: str
    state: Path
    run: Path
    volt: str
    volt_token_file: Path | None = None
    libvirt: str = "qemu:///system"
    accel: str = "auto"
    probe_kernel: Path | None = None
    idle_grace: float = 600.0
    source: str = "chunkstore"
    attach: str = ""
    cache: str = ""
    export: str = ""
    snapshot: str = "qcow2"
    address: str = ""
    port: int = 0
    cache_limit: int | None = None
    up: int | None = None
    down: int | None = None
    connections: int | None = None
    path_policy: str = FAILOVER
    group: str | None = None
    reserve: int | None = None
    location: str = ""

    @property
    def gid(self) -> int | None:
        if not self.group:
            return None
        try:
            return grp.getgrnam(self.group).gr_gid
        except KeyError:
            raise ConfigError(
                f"there is no group {self.group!r} on this host; make it, or say another --group"
            ) from None

    @property
    def drivers(self) -> Drivers:
        return Drivers(self.attach, self.cache, self.export, self.snapshot, self.source)

    @property
    def place(self) -> Place:
        return Place(
            self.state, self.run, self.name, self.address, self.path_policy, self.gid, self.reserve, self.port,
            self.cache_limit, Limits(self.up, self.down, self.connections),
        )  # fmt: skip

    @property
    def socket(self) -> Path:
        return self.run / SOCKET


def _check_names(config: AgentConfig) -> None:
    for check, option in (
        (partial(check_name, "host", config.name), "name"),
        (partial(check_location, config.location), "place"),
    ):
        try:
            check()
        except BadRequest as error:
            raise ConfigError(f"{error}; give one with --{option}") from None


def prepare(config: AgentConfig) -> list[int]:
    """Check the settings, make the folders, lock them for this process and keep there which drivers use them.

    Returns the locks, to be kept open.

    Raises ConfigError.
    """
    _check_names(config)
    for folder in (config.state, config.run):
        if not folder.is_absolute():
            raise ConfigError(f"{str(folder)!r} must be an absolute path")
    if config.state == config.run:
        raise ConfigError(f"{config.state} cannot be both the state and the run folder")
    gid = config.gid
    room = SOCKET_PATH_MAX - LONGEST_SOCKET
    if len(os.fsencode(config.run)) > room:
        raise ConfigError(f"the run folder {config.run} is too long for unix sockets: at most {room} bytes")
    try:
        # The user that the host's libvirt runs QEMU as may pass through to the files of its VM, and list nothing; the
        # members of the group may do so to the socket of the API, and to disks.
        mode = 0o711 if os.geteuid() == 0 or gid is not None else 0o700
        below = (config.state / name for name in ("snapshots", "snapshots/.layers", "machines"))
        folders = (config.state, config.run, *below)
        mark(config.state)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        if not is_ours(config.run):
            raise ConfigError(f"the run folder {config.run} belongs to somebody else: say another one with --run")
        for folder in folders:
            folder.chmod(mode)
        serve_to(config.run / "serve", gid)
        return _hold(config)
    except OSError as error:
        raise ConfigError(f"cannot use {error.filename}: {error.strerror}") from error


def agent_id(state: Path) -> str:
    """The id of the agent of this state folder: 32 random hexadecimal digits, made at the first start.

    By it Volt tells an agent that was started again from another agent under the same host name.
    Raises ConfigError.
    """
    path = state / "agent.id"
    try:
        if not path.exists():
            write_atomically(path, f"{secrets.token_hex(16)}\n".encode())
        known = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot use the id of this agent in {path}: {error}") from error
    if not re.fullmatch(r"[0-9a-f]{32}", known):
        raise ConfigError(f"{path} does not hold 32 hexadecimal digits: delete it, and the agent gets a new id")
    return known


def share(path: Path, gid: int, mode: int) -> None:
    """Let a group have a file or folder of this user's. Raises ConfigError."""
    try:
        os.chown(path, -1, gid)
        path.chmod(mode)
    except OSError as error:
        raise ConfigError(f"group {gid} cannot have {path}: {error.strerror}") from error


def serve_to(folder: Path, gid: int | None) -> None:
    """Let QEMU connect to the sockets in ``folder``, and nobody else: as libvirt's user, or as a member of the group.

    Raises ConfigError, OSError.
    """
    folder.mkdir(exist_ok=True, mode=0o700)
    groups = [] if os.geteuid() != 0 else [*_hypervisor()]
    groups += [] if gid is None else [gid]
    if len(groups) < 2:
        let_pass(folder, [])
        if groups:
            share(folder, groups[0], 0o710)
        else:
            folder.chmod(0o700)
        return
    if folder.stat().st_gid != groups[0]:
        os.chown(folder, -1, groups[0])
    try:
        let_pass(folder, groups[1:])  # at once: who connects meanwhile is not turned away
    except OSError as error:
        raise ConfigError(
            f"two groups cannot pass through {folder}: {error.strerror}; the run folder has to be on a file system with"
            " access control lists, as /run is"
        ) from error


def _hypervisor() -> Iterator[int]:
    """The group of libvirt's QEMU, if there is one."""
    with contextlib.suppress(KeyError):
        yield grp.getgrnam(LIBVIRT_GROUP).gr_gid


def _hold(config: AgentConfig) -> list[int]:
    with contextlib.ExitStack() as undo:
        locks = []
        for folder in (config.state, config.run):
            locks.append(_lock(folder / "lock"))
            undo.callback(os.close, locks[-1])
        settle(config.state, config.drivers)
        keep_address(config.state, config.address)
        undo.pop_all()
    return locks


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(f"another agent is running on {path.parent}") from None
    return fd
