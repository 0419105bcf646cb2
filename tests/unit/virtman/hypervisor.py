"""libvirt's own test driver: a hypervisor in the memory of this process."""

from __future__ import annotations

from pathlib import Path

import libvirt
from testtools import TestCase

from drivers.base import Device

LIBVIRT = "test:///default"


def connect(test: TestCase) -> libvirt.virConnect:
    """A connection of the test's own. The hypervisor lives as long as somebody is connected to it."""
    connection = libvirt.open(LIBVIRT)
    test.addCleanup(connection.close)
    test.addCleanup(_forget_domains, connection)
    return connection


def _forget_domains(connection: libvirt.virConnect) -> None:
    """Domains outlive the test as long as anything of libvirt refers to the connection."""
    for domain in connection.listAllDomains():
        if domain.isActive():
            domain.destroy()
        domain.undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE)


def domains(connection: libvirt.virConnect) -> list[str]:
    """Names of what libvirt knows, besides the domain that its test driver begins with."""
    return sorted(domain.name() for domain in connection.listAllDomains() if domain.name() != "test")


def disk_in(folder: Path) -> Device:
    """A VM's disk, as a snapshot driver hands it over. Its file is empty."""
    file = folder / "vm.qcow2"
    file.touch()
    return Device(1 << 20, file, {"driver": "qcow2", "file": {"driver": "file", "filename": str(file)}})
