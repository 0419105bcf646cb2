"""A cloud of the lab: real agents and a real Volt on this machine, OpenNebula's stand, and our drivers in it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from testtools.matchers import HasLength

from lab.cluster import Cluster
from lab.opennebula import Answer, Datastore, Host, Image, Vm
from lab.tools import CHECKOUT
from tests.programs import qemu_io, require_root
from tests.unit.virtman.scene import folder_for
from tests.userspace.opennebula.stand import StandTestCase

IMAGES, SYSTEM, OTHER_SYSTEM = 100, 0, 105
MIB = 1 << 20
IMAGE_MIB = 4
BASE = 0x5A
"""The byte that all of an image holds."""
USER = "daemon"
"""As whom drivers come to hosts, and whose group the agents let in: every Debian has both, and nothing is theirs."""


class DriversTestCase(StandTestCase):
    """A test with a front end and OpenNebula's drivers, ours installed, and hosts of a stack."""

    system = "ssh"
    """The driver of the system datastores."""
    stack, disk_format, disk_type, origins = "chunkstore", "qcow2", "FILE", "origin host-1"

    def start_drivers(self, folder: Path, hosts: Mapping[str, Host]) -> None:
        """Start the stand in a folder, and make datastores."""
        self.start_stand(folder, hosts)
        for number in (SYSTEM, OTHER_SYSTEM):
            self.one.system_datastore(number, self.system)
        self.store = self.image_datastore()

    def install(self) -> None:
        """Install the drivers as an operator does."""
        argv = [str(CHECKOUT / "opennebula_tm" / "install"), "frontend", "--stack", self.stack, "--yes"]
        argv += ["--one-location", str(self.frontend.location)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        self.assertEqual(0, done.returncode, done.stderr)

    def image_datastore(self, **attributes: str) -> Datastore:
        """A datastore of our drivers."""
        safe = {
            "BRIDGE_LIST": self.origins,
            "DRIVER": self.disk_format,
            "DISK_TYPE": self.disk_type,
            "SAFE_DIRS": "/tmp",
            "RESTRICTED_DIRS": "/etc",
        }
        return self.one.image_datastore(IMAGES, "virtman", "virtman", **safe, TM_MAD_SYSTEM="ssh,local", **attributes)

    def add_image(
        self, number: int, *, persistent: bool = False, mib: int = IMAGE_MIB, byte: int = BASE, **attributes: str
    ) -> Image:
        """An image all of one byte."""
        file = self.folder / f"image-{number}.raw"
        file.write_bytes(bytes([byte]) * (mib * MIB))
        image = Image(number, IMAGES, str(file), persistent=persistent, attributes=attributes)
        self.ok(self.one.add_image(image))
        file.unlink()
        return image

    def vm(self, *images: Image, number: int = 42, grow: int = 0) -> Vm:
        """A VM with a disk of each image; ``grow``: MiB that the first one gets in addition."""
        disks = [self.one.disk_of(image, n, self.system, DRIVER=self.disk_format) for n, image in enumerate(images)]
        if grow:
            disks[0].size += grow
        return self.one.vm(disks, number)

    def ok(self, answer: Answer) -> Answer:
        """What must have gone well."""
        self.assertTrue(answer.ok, answer.reason)
        return answer

    def refused(self, answer: Answer, reason: str) -> None:
        """What must have failed, with this in the one line that users see."""
        self.assertFalse(answer.ok)
        self.assertIn(reason, answer.reason)
        self.assertThat(answer.reason.splitlines(), HasLength(1))


class CloudTestCase(DriversTestCase):
    """A test with an origin and two hosts of its own, on this machine, of the chunk store."""

    def setUp(self) -> None:
        """Start it all."""
        super().setUp()
        require_root(self, "hosts are mount namespaces")
        self.folder = folder_for(self)
        self.cluster = Cluster(self.folder / "cluster", 3, agent_options=["--group", USER])
        self.cluster.__enter__()
        self.addCleanup(self.cluster.__exit__, None, None, None)
        for folder in (self.folder, self.cluster.run_folder(0).parent):
            folder.chmod(0o711)
        # No host sees the disks of another.
        hosts = {
            name: Host(self.cluster.socket(number), (self.folder / "cluster" / name,), USER)
            for number, name in enumerate(self.cluster.names)
        }
        self.start_drivers(self.folder, hosts)

    def link(self, vm: Vm, disk: int) -> Path:
        """The link to a disk in the VM's folder on its host, as seen from outside."""
        store = self.frontend.datastores() / str(vm.here.datastore)
        return self.frontend.seen(vm.here.host, store / str(vm.number) / f"disk.{disk}")

    def io(self, vm: Vm, disk: int, command: str) -> None:
        """Have qemu-io do something with a disk as a hypervisor finds it; fail if it reads something else."""
        qemu_io(self.link(vm, disk), command)

    def write(self, vm: Vm, disk: int, byte: int, offset: int = MIB) -> None:
        """Let a VM write 64 KiB of a byte."""
        self.io(vm, disk, f"write -P {byte} {offset} 64k")

    def reads(self, vm: Vm, disk: int, byte: int, offset: int = MIB) -> None:
        """A VM reads 64 KiB of this byte."""
        self.io(vm, disk, f"read -P {byte} {offset} 64k")

    def disks(self) -> dict[str, set[str]]:
        """The disks of all hosts, by host."""
        return {
            name: {vm.name for vm in agent.vms()}
            for name, agent in zip(self.cluster.names, self.cluster.agents, strict=True)
        }

    def nothing_left(self) -> None:
        """No host has a disk, and no folder anything of a VM."""
        self.assertEqual({name: set() for name in self.cluster.names}, self.disks())
        for host in (None, *self.cluster.names):
            left = [str(path) for path in self.frontend.datastores(host).glob("[0-9]*/**/*") if self._matters(path)]
            self.assertEqual([], left)
            self.assertEqual([], list((self.frontend.datastores(host) / ".virtman").glob("*.lock")))

    @staticmethod
    def _matters(path: Path) -> bool:
        """Folders, the mark of a datastore, and what belongs to images may stay."""
        images = f"datastores/{IMAGES}/" in str(path)
        return not path.is_dir() and path.name != ".monitor" and not images
