"""OpenNebula's drivers with hosts of the kernel stack, reached as OpenNebula's user, who may do what its group may."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from lab.kernel.machine import Machine, make_key
from lab.kernel.services import AGENT_SETTINGS
from lab.opennebula import Host, Image, Vm
from tests.kernel.stacks import StackCase
from tests.unit.virtman.scene import folder_for
from tests.userspace.opennebula.cloud import BASE, IMAGES, MIB, SYSTEM, DriversTestCase

pytestmark = pytest.mark.long

USER = "oneadmin"
HOME = f"/home/{USER}"
INSTALL = "/opt/virtman/opennebula_tm/install"


class KernelDriversTest(StackCase, DriversTestCase):
    system = "virtman"
    stack, disk_format, disk_type, origins = "kernel", "raw", "BLOCK", "origin"

    def setUp(self) -> None:
        super().setUp()
        folder = folder_for(self)
        make_key(folder / "key")
        for machine in self.machines.values():
            self.admit(machine, folder / "key")
        become = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups", "env", f"HOME={HOME}"]
        ssh = str(shutil.which("ssh"))
        hosts = {
            name: Host(remote=(ssh, *shlex.split(machine.command_line)[1:], "--", shlex.join(become)))
            for name, machine in self.machines.items()
        }
        self.start_drivers(folder, hosts)
        for machine in self.machines.values():
            self.addCleanup(machine.run, ["rm", "-rf", str(folder)])

    def admit(self, machine: Machine, key: Path) -> None:
        """Let OpenNebula's user be there, reach the others, and ask the agent, as docs/opennebula.md says."""
        settings = machine.run(["cat", AGENT_SETTINGS])
        # The lab's guests have systemd-user-sessions.service masked, which lets others than root log in.
        machine.run(["rm", "-f", "/run/nologin"])
        machine.run(["useradd", "--create-home", "--user-group", USER])
        self.addCleanup(machine.run, ["userdel", "--remove", USER])
        known = [f"Host {name}\n HostName {other.address}\n" for name, other in self.machines.items()]
        config = "StrictHostKeyChecking accept-new\n" + "".join(known)
        public = key.with_suffix(".pub").read_text()
        files = {"id_ed25519": key.read_text(), "authorized_keys": public, "config": config}
        machine.run(["mkdir", "-m", "700", f"{HOME}/.ssh"])
        for name, content in files.items():
            machine.run(["sh", "-c", 'umask 077; cat > "$0"', f"{HOME}/.ssh/{name}"], stdin=content)
        machine.run(["chown", "-R", f"{USER}:", f"{HOME}/.ssh"])
        machine.run([INSTALL, "host", "--yes"])
        self.addCleanup(machine.run, ["systemctl", "restart", "virtman-agent.service"])
        self.addCleanup(lambda: self.assertEqual(settings, machine.run(["cat", AGENT_SETTINGS])))
        self.addCleanup(machine.run, [INSTALL, "host", "--remove", "--yes"])
        machine.run(["systemctl", "restart", "virtman-agent.service"])
        machine.run([INSTALL, "host", "--check"])

    def io(self, vm: Vm, command: str) -> None:
        """Have OpenNebula's user's qemu-io do something with a VM's first disk; fail if it reads something else."""
        link = f"{self.frontend.datastores()}/{vm.here.datastore}/{vm.number}/disk.0"
        become = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups"]
        said = self.machines[vm.here.host].run([*become, "qemu-io", "-f", "raw", "-c", command, link])
        self.assertNotIn("failed", said)

    def write(self, vm: Vm, byte: int) -> None:
        self.io(vm, f"write -P {byte} {MIB} 64k")

    def reads(self, vm: Vm, byte: int, offset: int = MIB) -> None:
        self.io(vm, f"read -P {byte} {offset} 64k")

    def test_the_life_of_a_vm(self) -> None:
        image = self.add_image(7)
        vm = self.vm(image, grow=4)
        self.ok(self.one.deploy(vm, "host-1", SYSTEM))
        self.reads(vm, BASE)
        self.reads(vm, 0, 6 * MIB)
        self.write(vm, 1)
        self.ok(self.one.snapshot_create(vm, 0, 0))
        self.write(vm, 2)
        self.one.power_off(vm)
        self.ok(self.one.snapshot_revert(vm, 0, 0))
        self.reads(vm, 1)
        self.ok(self.one.resize(vm, 0, 12))
        self.reads(vm, 0, 11 * MIB)

        self.ok(self.one.migrate(vm, "host-2", SYSTEM))
        self.reads(vm, 1)
        self.reads(vm, BASE, 2 * MIB)
        self.ok(self.one.stop(vm))
        self.ok(self.one.resume(vm, "host-1", SYSTEM))
        self.reads(vm, 1)

        saved = Image(8, IMAGES)
        self.ok(self.one.save_as(vm, 0, saved))
        other = self.vm(saved, number=43)
        self.ok(self.one.deploy(other, "host-2", SYSTEM))
        self.reads(other, 1)
        for one in (vm, other):
            self.ok(self.one.terminate(one))
        for machine in self.machines.values():
            self.assertEqual([], self.agent(machine).vms())
        for one_image in (saved, image):
            self.ok(self.one.remove_image(one_image))
