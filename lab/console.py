"""A shell in a VM, on its serial port."""

from __future__ import annotations

import os
import re
import select
import time
import tty
from xml.etree import ElementTree as ET

import libvirt

from lab.errors import ConsoleFailed


class Console:
    """Root's shell in a VM of the lab's guest that shows its login prompt. It needs libvirt only to begin."""

    def __init__(self, uri: str, vm: str, timeout: float) -> None:
        """``timeout``: seconds that the guest has for each answer. Raises ConsoleFailed."""
        self._open(uri, vm, timeout)
        self._send("root")
        self._await(rb"\$ |# ")
        self._send("stty -echo; PS1= PS2= exec sh")  # one that does not edit lines
        self.run("cd /root")

    @classmethod
    def of_shell(cls, uri: str, vm: str, timeout: float) -> Console:
        """That of a VM in which the shell runs already."""
        console = cls.__new__(cls)
        console._open(uri, vm, timeout)
        return console

    def _open(self, uri: str, vm: str, timeout: float) -> None:
        self._vm, self._timeout = vm, timeout
        self._fd = os.open(_terminal(uri, vm), os.O_RDWR | os.O_NOCTTY)
        tty.setraw(self._fd)
        self._asked = time.monotonic_ns()

    def close(self) -> None:
        """Leave the shell as it is."""
        os.close(self._fd)

    def run(self, command: str) -> str:
        """What a command prints. Raises ConsoleFailed if it fails, or if the guest does not answer."""
        self._asked += 1
        self._send(f"{command}\necho ended-{self._asked}-$?")
        found = self._await(rb"(?s)(.*)ended-%d-(\d+)" % self._asked)
        said = found[1].decode(errors="replace").replace("\r", "").strip()
        if found[2] != b"0":
            raise ConsoleFailed(f"{self._vm}: {command}: exit code {found[2].decode()}: {said}")
        return said

    def _send(self, line: str) -> None:
        os.write(self._fd, line.encode() + b"\n")

    def _await(self, pattern: bytes) -> re.Match[bytes]:
        seen, deadline = b"", time.monotonic() + self._timeout
        while not (found := re.search(pattern, seen)):
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ConsoleFailed(f"{self._vm} does not answer on its serial port: {seen[-2000:]!r}")
            seen += os.read(self._fd, 65536)
        return found


def _terminal(uri: str, vm: str) -> str:
    connection = libvirt.open(uri)
    try:
        root = ET.fromstring(connection.lookupByName(vm).XMLDesc())
    finally:
        connection.close()
    source = root.find("devices/serial/source")
    if source is None:
        raise ConsoleFailed(f"{vm} has no serial port")
    return source.attrib["path"]
