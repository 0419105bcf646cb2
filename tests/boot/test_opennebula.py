"""A VM that libvirt boots as OpenNebula has it do: from the link in the VM's folder, by a QEMU of the agent's group."""

from __future__ import annotations

from pathlib import Path

import libvirt
import pytest

from lab.guest import guest
from lab.libvirt import PrivateLibvirt
from lab.login import io_errors, wait_login
from lab.opennebula import Image, Vm
from lab.tools import run
from tests.patience import PATIENCE
from tests.userspace.opennebula.cloud import IMAGES, SYSTEM, USER, CloudTestCase

pytestmark = pytest.mark.long

DOMAIN = """
<domain type='qemu'><name>one-42</name><memory unit='MiB'>256</memory>
<os><type arch='x86_64' machine='q35'>hvm</type></os>
<devices>
<disk type='file'><driver name='qemu' type='qcow2' cache='none'/><source file='{disk}'/>
<target dev='vda' bus='virtio'/></disk>
<serial type='pty'><log file='{log}' append='on'/></serial>
</devices></domain>
"""


class BootTest(CloudTestCase):
    system = "virtman"

    def setUp(self) -> None:
        super().setUp()
        self.private = PrivateLibvirt(self.folder / "libvirt", USER)
        self.private.start()
        self.addCleanup(self.private.stop)

    def boot(self, vm: Vm) -> tuple[libvirt.virDomain, Path]:
        """Start it; the log of its console is made when it writes."""
        log = self.folder / "console.log"
        log.touch()
        log.chmod(0o666)
        connection = libvirt.open(self.private.uri)
        self.addCleanup(connection.close)
        return connection.createXML(DOMAIN.format(disk=self.link(vm, 0), log=log)), log

    def test_a_vm_boots_from_the_link_and_its_disk_is_not_changed_under_it(self) -> None:
        file = self.folder / "guest.raw"
        run(["cp", "--sparse=always", guest().disk, file])
        image = Image(7, IMAGES, str(file))
        self.ok(self.one.add_image(image))
        vm = self.vm(image)
        self.ok(self.one.deploy(vm, "host-1", SYSTEM))
        domain, log = self.boot(vm)
        wait_login("guest", log, PATIENCE)
        self.assertEqual(0, io_errors(log))
        in_use = "its disk is open in a QEMU that VirtMan did not start"
        self.refused(self.one.snapshot_create(vm, 0, 0), in_use)
        self.refused(self.one.save_as(vm, 0, Image(8, IMAGES)), in_use)
        self.assertTrue(domain.isActive())
        domain.destroy()
        self.ok(self.one.terminate(vm))
        self.nothing_left()
