"""The contract of a hypervisor, held by libvirt (its test driver) and by the double."""

from __future__ import annotations

import libvirt

from drivers.base import Device
from tests.contracts import machines
from tests.doubles.machines import MachinesDouble
from tests.unit.virtman.scene import folder_for
from virtman.machines import LibvirtMachines

URI = "test:///default"


class DoubleTest(machines.MachinesContract):
    def setUp(self) -> None:
        super().setUp()
        self.machines = self.double = MachinesDouble()
        self.disk = Device(1 << 20)

    def files(self) -> list[str]:
        return sorted(self.double.files)

    def running(self) -> list[str]:
        return sorted(self.double.running)


class LibvirtTest(machines.MachinesContract):
    def setUp(self) -> None:
        super().setUp()
        folder = folder_for(self)
        self.libvirt = libvirt.open(URI)  # its domains live as long as somebody is connected
        self.addCleanup(self.libvirt.close)
        self.addCleanup(self.forget_domains)
        self.folder = folder / "machines"
        self.machines = LibvirtMachines(URI, "here", self.folder, "tcg")
        disk = folder / "vm.qcow2"
        disk.touch()
        self.disk = Device(1 << 20, disk, {"driver": "qcow2", "file": {"driver": "file", "filename": str(disk)}})

    def forget_domains(self) -> None:
        for domain in self.libvirt.listAllDomains():
            if domain.isActive():
                domain.destroy()
            domain.undefine()

    def files(self) -> list[str]:
        return sorted({path.name.partition(".")[0] for path in self.folder.iterdir()})

    def running(self) -> list[str]:
        return sorted(domain.name() for domain in self.libvirt.listAllDomains() if domain.name() != "test")
