"""The contract of a hypervisor, held by libvirt (its test driver) and by the double."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import libvirt

from drivers.base import Device
from tests.contracts import machines
from tests.doubles.machines import MachinesDouble
from tests.unit.virtman.hypervisor import LIBVIRT, connect, disk_in, domains
from tests.unit.virtman.scene import folder_for
from virtman.machines import LibvirtMachines


class DoubleTest(machines.MachinesContract):
    def setUp(self) -> None:
        super().setUp()
        self.machines = self.double = MachinesDouble()
        self.disk = Device(1 << 20)

    def files(self) -> list[str]:
        return sorted(self.double.files)

    def begins_with(self, vm: str) -> list[str]:
        return list(self.double.with_disks[vm])

    def running(self) -> list[str]:
        return sorted(self.double.running)

    def come(self, vm: str, domain: str) -> None:
        self.double.come(vm)

    def pause(self, vm: str) -> None:
        self.double.paused.add(vm)

    def paused(self, vm: str) -> bool:
        return vm in self.double.paused

    def save(self, vm: str) -> None:
        self.double.save(vm)


class LibvirtTest(machines.MachinesContract):
    def setUp(self) -> None:
        super().setUp()
        folder = folder_for(self)
        self.libvirt = connect(self)
        self.folder = folder / "machines"
        self.machines = LibvirtMachines(LIBVIRT, "here", self.folder, "tcg")
        self.disk = disk_in(folder)

    def files(self) -> list[str]:
        return sorted({path.name.partition(".")[0] for path in self.folder.iterdir()})

    def begins_with(self, vm: str) -> list[str]:
        root = ET.fromstring(self.libvirt.lookupByName(vm).XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
        return [serial.text or "" for serial in root.iterfind("devices/disk[@type='block']/serial")]

    def running(self) -> list[str]:
        return domains(self.libvirt)

    def come(self, vm: str, domain: str) -> None:
        self.libvirt.defineXML(domain).create()
        self.pause(vm)

    def pause(self, vm: str) -> None:
        self.libvirt.lookupByName(vm).suspend()

    def paused(self, vm: str) -> bool:
        return bool(self.libvirt.lookupByName(vm).state()[0] == libvirt.VIR_DOMAIN_PAUSED)

    def save(self, vm: str) -> None:
        self.libvirt.lookupByName(vm).managedSave()
