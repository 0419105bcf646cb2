"""What a hypervisor has to do, whoever is behind it: held to it are libvirt and the double of the agent's tests."""

from __future__ import annotations

from testtools import TestCase

from drivers.base import Device
from virtman.records import Boot
from virtman.vms import Machines

BOOT = Boot(memory=64, cpus=1, network="none")


class MachinesContract(TestCase):
    """A case sets ``machines`` and ``disk``."""

    machines: Machines
    disk: Device

    def files(self) -> list[str]:
        """Names of the VMs that there are files for, besides their disks."""
        raise NotImplementedError

    def running(self) -> list[str]:
        """Names of the VMs that run."""
        raise NotImplementedError

    def start(self, vm: str = "vm") -> None:
        self.machines.start(vm, self.disk, BOOT, [], None)

    def test_a_vm_that_was_started_runs_and_is_known(self) -> None:
        self.start()
        self.assertEqual((["vm"], True), (self.running(), self.machines.known("vm")))

    def test_a_vm_is_started_once(self) -> None:
        self.start()
        self.start()
        self.assertEqual((["vm"], ["vm"]), (self.running(), self.files()))

    def test_a_vm_that_was_never_started_is_not_known(self) -> None:
        self.start("other")
        self.assertFalse(self.machines.known("vm"))

    def test_a_vm_that_is_removed_is_gone_with_its_files_and_no_other_one(self) -> None:
        self.start()
        self.start("other")
        self.machines.remove("vm")
        self.assertEqual((["other"], ["other"]), (self.running(), self.files()))
        self.assertFalse(self.machines.known("vm"))

    def test_what_is_not_there_can_be_removed(self) -> None:
        self.machines.remove("vm")
        self.start()
        for _ in range(2):
            self.machines.remove("vm")
        self.assertEqual(([], []), (self.running(), self.files()))
