"""A QEMU boots from what libvirt is told by Nova."""

from __future__ import annotations

import shutil
import subprocess

from lab.guest import guest
from lab.login import io_errors, wait_login
from tests.openstack.computes import ComputesTest
from tests.patience import PATIENCE


class GuestTest(ComputesTest):
    COMPUTES = 2

    def base(self) -> str:
        """A volume with a Debian guest."""
        shutil.copy(guest().disk, self.folder / "guest.raw")
        return self.cinder.add(self.folder / "guest.raw")

    def test_a_guest_boots_from_the_disk_that_nova_names_on_a_host_that_reads_the_base_from_another(self) -> None:
        volume = self.base()
        for node in self.cluster.names:
            server = self.boot(volume, availability_zone=f"nova:{node}")
        (disk,) = self.xml[server["id"]].findall("devices/disk")
        log = self.folder / "console.log"
        log.touch()
        drive = f"file={disk.find('source').get('file')},format={disk.find('driver').get('type')},if=virtio"
        argv = ["qemu-system-x86_64", "-machine", "q35", "-m", "256", "-display", "none", "-serial", f"file:{log}"]
        qemu = subprocess.Popen([*argv, "-drive", drive], stdin=subprocess.DEVNULL)
        self.addCleanup(qemu.wait)
        self.addCleanup(qemu.kill)
        wait_login("guest", log, PATIENCE)
        self.assertEqual(0, io_errors(log))
        self.assertNotEqual([self.node_of(server)], self.images()[f"cinder-{volume}"])
