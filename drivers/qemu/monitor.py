"""QEMU's monitor (QMP), and a storage daemon of one's own to speak it with while no VM has the disk open.

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

from drivers.base import BlockNode, Monitor
from drivers.errors import MonitorFailed
from drivers.host.command import tool
from drivers.needs import Tool
from drivers.qemu.daemon import PROGRAM

log = logging.getLogger(__name__)

SETPRIV = Tool("setpriv", "util-linux")

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
        """Hang up."""
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


def is_locked(why: str) -> bool:
    """Whether QEMU says that it could not open a node because another program has its file open."""
    return _LOCKED.search(why) is not None


def open_node(monitor: Monitor, name: str, node: BlockNode) -> None:
    """Add a node under a name of the caller's. Raises MonitorFailed."""
    monitor.execute("blockdev-add", {**node, "node-name": name})


@contextlib.contextmanager
def private_daemon(exports: socket.socket | None = None) -> Iterator[Client]:
    """The monitor of a storage daemon that has nothing open yet, and ends with the block.

    What it is told to export it serves by NBD at the socket ``exports``, which listens.

    The kernel kills it if this thread dies before (prctl(2), PR_SET_PDEATHSIG). Whatever the daemon has open it closes
    if the block ends well; otherwise it is killed. Raises ToolMissing, MonitorFailed.
    """
    argv = [tool(SETPRIV.name), "--pdeathsig", "KILL", tool(PROGRAM)]
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
