"""QEMU's monitor (QMP), and private storage daemons, by which the agent opens the disk of a VM that does not run.

The protocol is QEMU's docs/interop/qmp-spec.txt: one JSON object a line, events in between.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from drivers.base import BlockNode
from drivers.errors import CommandFailed, DiskInUse, MonitorFailed
from drivers.host.command import tool
from drivers.needs import QEMU_STORAGE_DAEMON, Tool

log = logging.getLogger(__name__)

SETPRIV = Tool("setpriv", "util-linux")

PRIVATE_NODE = "virtman-private"

_ANSWER = 120.0
"""Seconds. To open a node over an NBD export that nobody serves takes QEMU its open-timeout."""

_ENDING = 30.0
_LOCKED = re.compile(r"Failed to (get|lock)\b.*\block|lock byte")
"""QEMU: block/file-posix.c, raw_check_lock_bytes and raw_apply_lock_bytes."""


class Client:
    """A monitor at the other end of a connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(_ANSWER)
        self._sock, self._lines = sock, sock.makefile("rb")
        self._receive("greeting")
        self.execute("qmp_capabilities")

    def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """What QEMU returns for one command. Raises MonitorFailed."""
        said = json.dumps({"execute": command, "arguments": dict(arguments or {})}).encode()
        try:
            self._sock.sendall(said + b"\n")
        except OSError as error:
            raise MonitorFailed(command, str(error)) from error
        answer = self._receive(command)
        while "return" not in answer and "error" not in answer:  # an event
            answer = self._receive(command)
        if "error" in answer:
            raise MonitorFailed(command, answer["error"]["desc"], answer["error"]["class"])
        log.debug("monitor: %s", said)
        return answer["return"]

    def close(self) -> None:
        self._lines.close()
        self._sock.close()

    def _receive(self, command: str) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except OSError as error:
            raise MonitorFailed(command, str(error)) from error
        if not line.endswith(b"\n"):
            raise MonitorFailed(command, "QEMU hung up")
        answer = json.loads(line)
        assert isinstance(answer, dict)  # noqa: S101  (so says the protocol)
        return answer


@contextlib.contextmanager
def disk_in_use_if_locked(vm: str) -> Iterator[None]:
    """Raise DiskInUse in place of an error by which QEMU says that another program has the disk's file open."""
    try:
        yield
    except (MonitorFailed, CommandFailed) as error:
        if _LOCKED.search(error.why if isinstance(error, MonitorFailed) else error.stderr):
            raise DiskInUse(vm) from error
        raise


@contextlib.contextmanager
def private_node(vm: str, node: BlockNode, exports: socket.socket | None = None) -> Iterator[Client]:
    """The monitor of a private daemon that has a node of a VM's disk open as PRIVATE_NODE.

    Raises DiskInUse, ToolMissing, MonitorFailed.
    """
    with private_daemon(exports) as monitor:
        with disk_in_use_if_locked(vm):
            monitor.execute("blockdev-add", {**node, "node-name": PRIVATE_NODE})
        yield monitor


@contextlib.contextmanager
def private_daemon(exports: socket.socket | None = None) -> Iterator[Client]:
    """The monitor of a storage daemon that has nothing open yet, and ends with the block.

    The daemon serves its exports by NBD at the listening socket ``exports``. The kernel kills the daemon if this thread
    dies (prctl(2), PR_SET_PDEATHSIG). If the block ends well the daemon closes what it has open; else it is killed.
    Raises ToolMissing, MonitorFailed.
    """
    argv = [tool(SETPRIV.name), "--pdeathsig", "KILL", tool(QEMU_STORAGE_DAEMON.name)]
    ours, its = socket.socketpair()
    try:
        monitor = ["--chardev", f"socket,id=monitor,fd={its.fileno()}", "--monitor", "chardev=monitor"]
        fds, null = [its.fileno()], subprocess.DEVNULL
        if exports is not None:
            monitor += ["--nbd-server", f"addr.type=fd,addr.str={exports.fileno()}"]
            fds.append(exports.fileno())
        process = subprocess.Popen(
            argv + monitor, stdin=null, stdout=null, stderr=null, pass_fds=fds, start_new_session=True
        )
    except BaseException:
        ours.close()
        raise
    finally:
        its.close()
    try:
        client = Client(ours)
        try:
            yield client
            _quit(client, process)
        finally:
            client.close()
    finally:
        ours.close()
        _kill(process)


def _quit(client: Client, process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(MonitorFailed, subprocess.TimeoutExpired):
        client.execute("quit")
        process.wait(_ENDING)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    try:
        process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        log.error("process %d was killed and hangs in the kernel: %s", process.pid, process.args)
