"""The block nodes of a running QEMU, found by the files that they have open.

A node that was made nested in another has a random name. The file name of a format node is of no use either: over a
backing that was given as options it is a JSON text, which QEMU cuts off at 4 KiB (QEMU: block.c,
bdrv_refresh_filename). The node below, which reads the file, has a plain file name.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from drivers.base import Monitor
from drivers.errors import MonitorFailed

_FILE, _BACKING = "file", "backing"
_STORAGE = frozenset({"file", "host_device"})
"""QEMU's drivers of nodes over a file or a device of the host."""


def named_after(kind: str, what: str) -> str:
    """A name for a node, always the same for the same; QEMU's names have at most 31 characters (QEMU: block.c)."""
    return f"virtman-{kind}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"


class Nodes:
    """The graph of the QEMU behind ``monitor``, as it was at the last ``refresh``.

    QEMU is asked only once for the files of its nodes, since the VM stands still meanwhile: for a second with 100
    layers, as QEMU writes the name of each node with the names of all nodes below. The command for the graph begins
    with x-debug, is in all of QEMU 4.0 to 10, and takes no time.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._ask()
        self.refresh()

    def _ask(self) -> None:
        infos = self.monitor.execute("query-named-block-nodes", {"flat": True})
        self._infos: dict[str, dict[str, Any]] = {info["node-name"]: info for info in infos}

    def refresh(self) -> None:
        """Ask for the graph as it is now."""
        graph = self.monitor.execute("x-debug-query-block-graph")
        names = {node["id"]: node["name"] for node in graph["nodes"]}
        self._names = frozenset(names.values())
        self._edges: list[tuple[str, str, str]] = [
            (names[edge["parent"]], edge["name"], names[edge["child"]]) for edge in graph["edges"]
        ]

    def add(self, name: str, path: Path) -> None:
        """Note a format node that was just made over a file."""
        self.refresh()
        self._infos[self._child(name, _FILE)] = {"drv": "file", "file": str(path)}

    def of(self, path: Path) -> str | None:
        """The name of the format node over a file or device, by the very path that it was opened by.

        A device may have no format node over it: then it is the device's own.
        """
        infos = [(name, info) for name, info in self._infos.items() if name in self._names]
        found = [name for name, info in infos if info["drv"] in _STORAGE and info["file"] == str(path)]
        formats = [parent for parent, edge, child in self._edges if edge == _FILE and child in found]
        return next(iter(formats + found), None)

    def demand(self, path: Path) -> str:
        """As ``of``. Raises MonitorFailed if QEMU does not have it open."""
        name = self.of(path)
        if name is None:
            raise MonitorFailed("query-named-block-nodes", f"it does not have {path} open")
        return name

    def backing(self, name: str) -> str | None:
        """The name of the node that a node reads from what it does not hold."""
        return next((child for parent, edge, child in self._edges if (parent, edge) == (name, _BACKING)), None)

    def could_write(self, name: str) -> bool:
        """Whether a node was open for writing when QEMU was asked for its files."""
        return not self._infos.get(name, {}).get("ro", True)

    def write_no_more(self, name: str) -> None:
        """Have a node open for reading only if it is the backing of another. Raises MonitorFailed.

        QEMU 10 leaves a node open for writing that a job has written to, and its lock refuses whoever reads the file.
        """
        if any((edge, child) == (_BACKING, name) for _, edge, child in self._edges):
            self.monitor.execute("blockdev-reopen", {"options": [{**self.as_it_is(name), "read-only": True}]})

    def as_it_is(self, name: str) -> dict[str, Any]:
        """The options of a disk's format node that is to be reopened as it is.

        QEMU does not tell whether the node passes discards on, and would stop that: VMs' disks always do.
        """
        if name not in self._infos:
            self._ask()
        info = self._infos[name]
        cache = {"direct": info["cache"]["direct"], "no-flush": info["cache"]["no-flush"]}
        return {
            "driver": info["drv"],
            "node-name": name,
            "file": self._child(name, _FILE),
            "backing": self.backing(name),
            "cache": cache,
            "discard": "unmap",
            "detect-zeroes": info["detect_zeroes"],
        }

    def _child(self, name: str, wanted: str) -> str:
        return next(child for parent, edge, child in self._edges if (parent, edge) == (name, wanted))
