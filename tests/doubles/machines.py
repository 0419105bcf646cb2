"""A hypervisor in memory."""

from __future__ import annotations

from tests.doubles.drivers import Moment, unnoticed


class MachinesDouble:
    """VMs that a hypervisor knows."""

    def __init__(self) -> None:
        self.moment: Moment = unnoticed
        self.failing: Exception | None = None
        self.defined: set[str] = set()

    def remove(self, vm: str) -> None:
        self.moment("before machines.remove")
        if self.failing is not None:
            raise self.failing
        self.defined.discard(vm)
        self.moment("after machines.remove")
