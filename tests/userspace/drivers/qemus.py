"""QEMUs that have a disk open: a VM with its monitor, and somebody else's."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from drivers.base import Device
from drivers.qemu.monitor import Client
from tests.programs import qemu_io

PROGRAM = "qemu-system-x86_64"
_EMPTY = [PROGRAM, "-nodefaults", "-display", "none"]


def monitored(*options: str, said: IO[bytes] | int) -> tuple[subprocess.Popen[bytes], Client]:
    """A QEMU with these options, whose output goes to ``said``, and its monitor."""
    ours, its = socket.socketpair()
    argv = [*_EMPTY, "-M", "q35", "-accel", "tcg", *options]
    argv += ["-chardev", f"socket,id=monitor,fd={its.fileno()}", "-mon", "chardev=monitor,mode=control"]
    # What qemu-io's commands say goes to the standard output, which is no terminal here.
    process = subprocess.Popen(["stdbuf", "-oL", *argv], stdout=said, pass_fds=[its.fileno()])
    its.close()
    return process, Client(ours)


class Vm:
    """A VM with a disk as the agent gives it one, that wrote nothing by itself; it has no guest.

    ``running``: its firmware starts the disk's device, and finds nothing to boot.
    """

    def __init__(self, device: Device, *, running: bool = False) -> None:
        node = json.dumps({**(device.node or {}), "node-name": "virtman-disk-node"})
        disk = "virtio-blk-pci,id=virtman-disk,drive=virtman-disk-node,iothread=io,werror=stop,rerror=stop,bootindex=1"
        options = ["-object", "iothread,id=io", "-blockdev", node, "-device", disk, *([] if running else ["-S"])]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._process, self.monitor = monitored(*options, said=self._said)
        self._read = 0

    def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """As the agent's monitor of a VM."""
        return self.monitor.execute(command, arguments)

    def io(self, command: str) -> str:
        """A command of qemu-io, through the VM's device."""
        line = f'qemu-io -d virtman-disk/virtio-backend "{command}"'
        answer = str(self.monitor.execute("human-monitor-command", {"command-line": line}))
        end = os.fstat(self._said.fileno()).st_size
        said = os.pread(self._said.fileno(), end, self._read).decode(errors="replace")
        self._read = end
        return said + answer

    def write(self, at: int, pattern: int) -> None:
        """4 KiB, flushed, as a guest that means it to be kept."""
        said = self.io(f"write -P {pattern} {at} 4k") + self.io("flush")
        assert "wrote 4096" in said, said

    def holds(self, at: int, pattern: int) -> bool:
        """Whether 4 KiB are what was written."""
        said = self.io(f"read -P {pattern} {at} 4k")
        return "read 4096" in said and "verification failed" not in said

    def files(self) -> list[str]:
        """The files that it has open for its disk, and whether only to read."""
        nodes = self.execute("query-named-block-nodes", {"flat": True})
        return sorted(f"{Path(node['file']).name} {node['ro']}" for node in nodes if node["drv"] == "file")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait()
        self.monitor.close()
        self._said.close()


@contextlib.contextmanager
def stranger(path: Path) -> Iterator[None]:
    """Somebody has the disk open, by its path."""
    argv = [*_EMPTY, "-machine", "none", "-monitor", "stdio", "-drive", f"file={path},format=qcow2,if=none,id=disk"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"info block\n")
        process.stdin.flush()
        try:
            while b"virtual" not in (line := process.stdout.readline()) and b"disk" not in line:
                assert line, "it ended"
            yield
        finally:
            process.kill()


def write_disk(path: Path | None, source: Path) -> None:
    """Write a file's content to the beginning of a disk, which is named by nothing but its path."""
    content = source.read_bytes()
    source.write_bytes(content.ljust(512, b"\0"))
    qemu_io(str(path), f"write -s {source} 0 512")
