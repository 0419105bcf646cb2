"""What the tests that boot VMs share: the guest, a private libvirtd, clusters."""

from __future__ import annotations

import tempfile
from pathlib import Path

import testtools

from lab.cluster import Cluster
from lab.guest import Guest, guest
from lab.libvirt import PrivateLibvirt
from tests.programs import require, require_root


class VmTestCase(testtools.TestCase):
    """A test that boots VMs, under emulation: it works everywhere, and what is tested here is not the hypervisor."""

    def setUp(self) -> None:
        """Skip where the tools are missing; find or build the guest."""
        super().setUp()
        require_root(self, "the guest and the private libvirtd")
        require(self, "qemu-system-x86_64", "qemu-storage-daemon", "libvirtd", "mmdebstrap", "extlinux")
        self.guest: Guest = guest()
        folder = tempfile.TemporaryDirectory(dir="/tmp", prefix="vmtest-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def libvirt(self, user: str = "root", name: str = "libvirt") -> PrivateLibvirt:
        """A libvirtd of the test's own."""
        libvirt = PrivateLibvirt(self.folder / name, user)
        libvirt.start()
        self.addCleanup(libvirt.stop)
        return libvirt

    def cluster(self, hosts: int) -> Cluster:
        """Volt and hosts of the test's own, with a libvirtd; the origin has published the guest."""
        cluster = Cluster(
            self.folder, hosts, libvirt=self.libvirt().uri, volt_options=["--heartbeat", "0.5", "--lease", "60"]
        )
        self.addCleanup(cluster.stop)
        cluster.start()
        cluster.agents[0].publish("guest", self.guest.disk)
        return cluster
