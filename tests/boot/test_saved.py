"""libvirt saves a VM's memory after its disks have changed under it, and the VM goes on with what they are now."""

from __future__ import annotations

import libvirt
import libvirt_qemu

from lab.cluster import Cluster
from tests.boot.vms import VmTestCase
from tests.programs import qemu_io

HALT = bytes.fromhex("faf4ebfd").ljust(510, b"\0") + b"\x55\xaa"
"""A boot sector that switches interrupts off and halts."""
IO = 'qemu-io -d /machine/peripheral/virtman-disk/virtio-backend "{}"'


class SavedTest(VmTestCase):
    def setUp(self) -> None:
        super().setUp()
        private = self.libvirt()
        cluster = Cluster(self.folder, 1, libvirt=private.uri)
        self.addCleanup(cluster.stop)
        cluster.start()
        [self.agent] = cluster.agents
        image = self.folder / "image"
        image.write_bytes(HALT.ljust(8 << 20, b"\0"))
        self.agent.publish("image", image)
        self.agent.boot("vm", "image", memory=64, network="none")
        connection = libvirt.open(private.uri)
        self.addCleanup(connection.close)
        self.domain = connection.lookupByName("vm")

    def io(self, command: str) -> str:
        """Have the VM's QEMU write to its disk, or read, as its guest would."""
        return str(libvirt_qemu.qemuMonitorCommand(self.domain, IO.format(command), 1))

    def disk_reads(self, vm: str, pattern: int) -> None:
        """The disk of a VM that is off holds the byte at 4 MiB."""
        qemu_io(self.agent.vm(vm).disk.path, f"read -P {pattern} 4M 64k", options=["-r", "-f", "qcow2"])

    def test_it_goes_on_over_the_layers_and_disks_that_it_had_last(self) -> None:
        self.io("write -P 1 4M 64k")
        self.agent.take_snapshot("vm", "one")
        self.agent.clone("vm", ["clone"])
        self.agent.create("data", "image")
        self.agent.attach_disk("vm", "data")
        self.domain.managedSave()
        self.assertEqual("running", self.agent.start("vm").machine.state)
        self.assertNotIn("failed", self.io("read -P 1 4M 64k"))
        self.io("write -P 2 4M 64k")
        self.agent.detach_disk("vm", "data")
        self.domain.managedSave()
        self.agent.repair()  # as an agent does that starts; then others than the agent may start the VM
        self.domain.create()
        self.assertNotIn("failed", self.io("read -P 2 4M 64k"))
        self.agent.stop("vm", force=True)
        self.disk_reads("vm", 2)
        self.disk_reads("clone", 1)
        self.agent.revert("vm", "one")
        self.disk_reads("vm", 1)
