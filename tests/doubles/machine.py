"""A machine that has what a test says."""

from __future__ import annotations

from collections.abc import Collection

from drivers.needs import Machine, Node


class MachineDouble(Machine):
    """Has everything but what is named in ``without``: tools, modules, libraries, paths, or root."""

    def __init__(
        self, *, without: Collection[str] = (), debian_python: bool = True, kernel: str = "6.12.1-amd64",
        lvm_filter: str | None = None,
    ) -> None:  # fmt: skip
        self._without = without
        self._debian_python = debian_python
        self._kernel = kernel
        self._lvm_filter = lvm_filter

    @property
    def lvm_filter(self) -> str | None:
        return self._lvm_filter

    @property
    def kernel(self) -> str:
        return self._kernel

    @property
    def root(self) -> bool:
        return "root" not in self._without

    @property
    def debian_python(self) -> bool:
        return self._debian_python

    def has_tool(self, name: str) -> bool:
        return name not in self._without

    def has_library(self, module: str) -> bool:
        return module not in self._without

    def has_module(self, name: str) -> bool:
        return name not in self._without

    def has_node(self, node: Node) -> bool:
        return str(node.path) not in self._without
