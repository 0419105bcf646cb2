"""A hypervisor in memory."""

from __future__ import annotations

from drivers.base import Device
from tests.doubles.drivers import Moment, unnoticed
from virtman.records import Boot


class MachinesDouble:
    """VMs that a hypervisor knows; ``running`` has the disk that each one writes to, ``files`` who has a seed."""

    def __init__(self) -> None:
        self.moment: Moment = unnoticed
        self.failing: dict[str, Exception] = {}
        """What a call ("start") raises until it is taken out again."""
        self.running: dict[str, Device] = {}
        self.files: set[str] = set()

    def start(self, vm: str, disk: Device, boot: Boot, ssh_keys: list[str] | None, user_data: str | None) -> None:
        self._answer("start")
        self.files.add(vm)
        self.moment("within machines.start")
        self.running.setdefault(vm, disk)
        self.moment("after machines.start")
        if "start's answer" in self.failing:
            raise self.failing["start's answer"]

    def known(self, vm: str) -> bool:
        self._answer("known")
        return vm in self.running

    def remove(self, vm: str) -> None:
        self._answer("remove")
        self.running.pop(vm, None)
        self.files.discard(vm)
        self.moment("after machines.remove")

    def _answer(self, call: str) -> None:
        self.moment(f"before machines.{call}")
        if call in self.failing:
            raise self.failing[call]
