"""Reading and writing disks from within the agent: by their path, or by a private QEMU over their node."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from drivers.base import BlockNode, Device
from drivers.errors import BadDevice, DiskInUse
from drivers.qemu.monitor import PRIVATE_NODE, private_node
from drivers.qemu.nbdclient import Client

_EXPORT = "disk"
_ANSWER = 300.0
"""Seconds: a first write to a part of a cluster may have to read the rest of it from the host's parents."""

_MOST = 1 << 20
"""Bytes of zeros that are written at once where there is no way but to write them."""


class Blocks(Protocol):
    """A disk that is open. Offsets and lengths in bytes, multiples of 512.

    All calls raise DriverError or, as the operating system says it, OSError.
    """

    def read(self, offset: int, length: int) -> bytes:
        """What a range holds."""

    def write(self, offset: int, data: bytes) -> None:
        """Let a range hold this."""

    def zero(self, offset: int, length: int) -> None:
        """Let a range hold zeros."""

    def flush(self) -> None:
        """What was written is there after a power cut."""


@contextmanager
def open_blocks(vm: str, device: Device, *, write: bool = False) -> Iterator[Blocks]:
    """Open a VM's disk, or what a snapshot of it keeps. If the block ends well all that was written is durable.

    Raises DiskInUse, other DriverErrors, OSError.
    """
    opened = _by_qemu(vm, device.node, write) if device.node is not None else _by_path(vm, device.path, write)
    with opened as blocks:
        yield blocks
        if write:
            blocks.flush()


@contextmanager
def _by_qemu(vm: str, node: BlockNode, write: bool) -> Iterator[Blocks]:
    with contextlib.ExitStack() as stack:
        listener, ours = _nameless_sockets()
        stack.enter_context(listener)
        stack.enter_context(ours)
        monitor = stack.enter_context(private_node(vm, {**node, "read-only": not write}, listener))
        export = {"type": "nbd", "id": _EXPORT, "name": _EXPORT, "node-name": PRIVATE_NODE, "writable": write}
        monitor.execute("block-export-add", export)
        yield stack.enter_context(Client(ours, _EXPORT, timeout=_ANSWER))


def _nameless_sockets() -> tuple[socket.socket, socket.socket]:
    """A listening socket, and one connected to it. Nobody else can connect, since the path is gone."""
    listener, ours = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2))
    with tempfile.TemporaryDirectory(prefix="virtman-") as folder:
        path = f"{folder}/nbd"
        listener.bind(path)
        listener.listen(1)
        ours.connect(path)
    return listener, ours


@contextmanager
def _by_path(vm: str, path: Path | None, write: bool) -> Iterator[Blocks]:
    if path is None:
        raise BadDevice(f"VM {vm}: its disk has neither a path nor a node")
    try:
        fd = os.open(path, os.O_CLOEXEC | (os.O_RDWR | os.O_EXCL * _is_device(path) if write else os.O_RDONLY))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise DiskInUse(vm) from error
        raise
    try:
        yield _File(fd)
    finally:
        os.close(fd)


def _is_device(path: Path) -> bool:
    """O_EXCL refuses a block device that somebody uses (open(2))."""
    return stat.S_ISBLK(path.stat().st_mode)


class _File:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, offset: int, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = os.pread(self._fd, length - len(data), offset + len(data))
            if not part:
                raise OSError(errno.EIO, "the disk ends early")
            data += part
        return bytes(data)

    def write(self, offset: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def zero(self, offset: int, length: int) -> None:
        """Write zeros where there are none yet: a hole in a thin volume would read as the image again."""
        for start in range(offset, offset + length, _MOST):
            zeros = bytes(min(_MOST, offset + length - start))
            if self.read(start, len(zeros)) != zeros:
                self.write(start, zeros)

    def flush(self) -> None:
        os.fsync(self._fd)
