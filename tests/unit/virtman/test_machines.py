"""Running VMs, over libvirt's own test driver: a hypervisor in the memory of this process."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock
from uuid import uuid4

import libvirt
import libvirt_qemu
from testtools import TestCase
from testtools.matchers import Contains, Not

import virtman.libvirthost
from drivers.base import Device
from tests.unit.virtman.hypervisor import LIBVIRT, connect, disk_in
from tests.unit.virtman.scene import BOOT, folder_for
from tests.unit.virtman.test_seed import read
from virtman.errors import BadRequest, DomainForeign, HostTrouble, HypervisorError, UnknownVm, VmRuns
from virtman.libvirtdomain import shut_down
from virtman.machines import LibvirtMachines
from virtman.models import MigrationSource
from virtman.qemu import RunningVm, files_of, give_to_hypervisor
from virtman.seed import Identity

LONG = 600.0
"""Seconds that are enough everywhere."""
TRAVELLER = MigrationSource(uuid=uuid4(), memory=64, cpus=1, network="direct", seed="c2VlZA==", hardware="q35")


class MachinesTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.libvirt = connect(self)
        self.machines = self.of("here")
        self.disk = disk_in(self.folder)

    def of(self, owner: str) -> LibvirtMachines:
        return LibvirtMachines(LIBVIRT, owner, self.folder / "machines", "tcg")

    def start(self, vm: str = "vm", uuid: str | None = None, **boot: object) -> None:
        identity = Identity(vm, uuid or str(uuid4()), ["ssh-ed25519 AAAA"], "#cloud-config\n")
        self.machines.start(identity, self.disk, BOOT.model_copy(update=boot))

    def seed(self, vm: str = "vm") -> Path:
        return self.folder / "machines" / f"{vm}.seed.iso"

    def domain(self, vm: str = "vm") -> libvirt.virDomain:
        return self.libvirt.lookupByName(vm)


def with_firmware(domain: libvirt.virDomain, variables: Path) -> str:
    """The domain with UEFI."""
    loader = f"<loader readonly='yes' type='pflash'>/code.fd</loader><nvram>{variables}</nvram>"
    return str(domain.XMLDesc()).replace("</type>", f"</type>{loader}")


class StartTest(MachinesTest):
    def test_every_kind_of_network_is_known_again(self) -> None:
        for number, network in enumerate(("user", "none", "network:default", "bridge:br0")):
            self.start(f"vm{number}", network=network)
            self.start(f"vm{number}", network=network)

    def test_a_stopped_vm_starts_with_the_new_settings(self) -> None:
        self.start()
        self.domain().destroy()
        self.start(memory=128)
        self.assertEqual(128 << 10, self.domain().maxMemory())

    def test_what_an_administrator_has_changed_stays(self) -> None:
        self.start()
        self.domain().destroy()
        xml = self.domain().XMLDesc().replace("</metadata>", "</metadata><title>changed by hand</title>")
        self.libvirt.defineXML(xml)
        self.start()
        self.machines.follow("vm", self.disk)
        self.domain().destroy()
        self.machines.rename("vm", "new")
        self.machines.follow("new", self.disk)
        self.assertIn("changed by hand", self.domain("new").XMLDesc())
        self.assertIn(str(self.machines.console_log("new")), self.domain("new").XMLDesc())

    def test_a_network_of_no_kind_is_refused_before_anything_is_done(self) -> None:
        self.assertRaises(BadRequest, self.start, network="wifi")
        self.assertFalse(self.seed().exists())
        self.assertEqual({}, self.machines.states())

    def test_what_libvirt_refuses_is_told_in_its_words(self) -> None:
        uuid = str(uuid4())
        self.start("first", uuid)
        xml = self.domain("first").XMLDesc().replace("<name>first<", "<name>second<")
        self.domain("first").destroy()
        self.domain("first").undefine()
        self.libvirt.defineXML(xml)
        error = self.assertRaises(HypervisorError, self.start, "first", uuid)
        self.assertThat(str(error), Contains("second"))
        self.assertFalse(self.seed("first").exists(), "nothing is left of a start that failed")


class GiveTest(MachinesTest):
    class Libvirt:
        """One that runs its VMs as this process's user."""

        def getCapabilities(self) -> str:
            label = f'<baselabel type="qemu">+{os.getuid()}:+{os.getgid()}</baselabel>'
            return f"<capabilities><host><secmodel><model>dac</model>{label}</secmodel></host></capabilities>"

    def test_a_file_that_cannot_be_given_is_told(self) -> None:
        if os.geteuid() != 0:
            self.skipTest("nobody else gives files away")
        error = self.assertRaises(HostTrouble, give_to_hypervisor, self.Libvirt(), [self.folder / "gone"])
        self.assertThat(str(error), Contains("gone"))
        give_to_hypervisor(self.Libvirt(), [self.folder])

    def test_a_group_goes_on_reading_it_and_writes_no_more(self) -> None:
        if os.geteuid() != 0:
            self.skipTest("nobody else gives files away")
        file = self.folder / "0.qcow2"
        file.touch()
        os.chown(file, 12345, 1)
        file.chmod(0o660)
        give_to_hypervisor(self.Libvirt(), [file])
        found = file.stat()
        self.assertEqual((0, 1, 0o640), (found.st_uid, found.st_gid, found.st_mode & 0o777))

    def test_the_files_of_a_disk_are_those_of_all_its_layers(self) -> None:
        image = {"driver": "raw", "file": {"driver": "nbd", "server": {"type": "unix", "path": "/run/image.sock"}}}
        lower = {"driver": "qcow2", "file": {"driver": "file", "filename": "/disks/0.qcow2"}, "backing": image}
        upper = {"driver": "qcow2", "file": {"driver": "file", "filename": "/disks/1.qcow2"}, "backing": lower}
        self.assertEqual([Path("/disks/1.qcow2"), Path("/disks/0.qcow2")], list(files_of(upper)))
        self.assertEqual([], list(files_of(image)))

    def test_a_vm_that_starts_or_comes_is_given_all_files_of_its_disk(self) -> None:
        files = [self.folder / "0.qcow2", self.folder / "1.qcow2"]
        for file in files:
            file.touch()
        lower, upper = ({"driver": "qcow2", "file": {"driver": "file", "filename": str(file)}} for file in files)
        self.disk = Device(1 << 20, self.folder / "a link", {**upper, "backing": lower})
        with mock.patch.object(virtman.libvirthost, "give_to_hypervisor") as give:
            self.start()
            self.machines.expect("vm", self.disk, TRAVELLER)
        for call in give.call_args_list:
            self.assertEqual([self.seed(), files[1], files[0]], list(call.args[1]))
        self.assertEqual(2, give.call_count)


class Button:
    """The power button of a VM of libvirt's that listens from the second press on."""

    def __init__(self, domain: libvirt.virDomain) -> None:
        self._domain = domain
        self.presses = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._domain, name)

    def shutdown(self) -> None:
        """Press it. Raises libvirtError if the VM is off."""
        self.presses += 1
        if self.presses > 1:
            self._domain.shutdown()


class ShutDownTest(MachinesTest):
    def setUp(self) -> None:
        super().setUp()
        self.start()

    def test_a_vm_that_did_not_hear_it_is_asked_again(self) -> None:
        button = Button(self.domain())
        self.assertEqual((True, 2), (shut_down(button, timeout=LONG, again=0.01), button.presses))

    def test_one_that_goes_off_by_itself_before_or_while_it_is_asked_is_off(self) -> None:
        class Late(Button):
            def shutdown(self) -> None:
                """Press it, while the VM goes off."""
                self._domain.destroy()
                raise libvirt.libvirtError("it is off")

        for _ in range(2):
            self.assertTrue(shut_down(Late(self.domain()), timeout=LONG, again=LONG))

    def test_one_that_cannot_be_asked_is_an_error(self) -> None:
        class Stuck(Button):
            def shutdown(self) -> None:
                """Press it, in vain."""
                raise libvirt.libvirtError("no such button")

        self.assertRaises(libvirt.libvirtError, shut_down, Stuck(self.domain()), timeout=LONG, again=0.01)

    def test_one_that_does_not_go_off_is_told_of(self) -> None:
        button = Button(self.domain())
        self.assertEqual((False, 1), (shut_down(button, timeout=0.01, again=LONG), button.presses))


class StartAgainTest(MachinesTest):
    """Without keys: nobody says anew who the VM is."""

    def start_again(self) -> None:
        self.machines.start(Identity("vm", str(uuid4())), self.disk, BOOT)

    def test_it_keeps_its_seed(self) -> None:
        self.start()
        seed = self.seed().read_bytes()
        self.domain().destroy()
        self.start_again()
        self.assertEqual((True, seed), (self.domain().isActive(), self.seed().read_bytes()))

    def test_a_seed_that_is_lost_is_made_anew(self) -> None:
        self.start()
        self.domain().destroy()
        self.seed().unlink()
        self.start_again()
        self.assertThat(read(self.seed().read_bytes(), "meta-data"), Contains(self.domain().UUIDString()))


class RemoveTest(MachinesTest):
    def test_nothing_is_left(self) -> None:
        self.start()
        self.libvirt.defineXML(with_firmware(self.domain(), self.folder / "vm_VARS.fd"))
        for log in (self.machines.console_log("vm"), self.folder / "machines" / "vm.console.0"):  # as virtlogd names it
            log.touch()
        with mock.patch.object(libvirt.virDomain, "undefineFlags") as undefine:  # this libvirt does not know the flag
            self.machines.remove("vm")
        self.assertTrue(undefine.call_args.args[0] & libvirt.VIR_DOMAIN_UNDEFINE_NVRAM)
        self.domain().undefine()
        self.assertEqual({}, self.machines.states())
        self.assertEqual([], list((self.folder / "machines").iterdir()))


class RenameTest(MachinesTest):
    def setUp(self) -> None:
        super().setUp()
        self.start()
        self.domain().destroy()

    def test_all_that_libvirt_keeps_of_it_goes_along(self) -> None:
        firmware, console = self.folder / "vm_VARS.fd", self.machines.console_log("vm")
        self.libvirt.defineXML(with_firmware(self.domain(), firmware))
        for file in (firmware, console, console.with_name("vm.console.0"), console.with_name("vm-2.console")):
            file.write_text(file.name)
        for _ in range(2):
            self.machines.rename("vm", "new")
        files = {path.name: path.read_text() for path in console.parent.glob("*.console*")}
        self.assertEqual(
            {"new.console": "vm.console", "new.console.0": "vm.console.0", "vm-2.console": "vm-2.console"}, files
        )
        self.assertEqual("vm_VARS.fd", (self.folder / "new_VARS.fd").read_text())
        self.assertIn(f"{self.folder}/new_VARS.fd", self.domain("new").XMLDesc())


class StatesTest(MachinesTest):
    def test_a_vm_is_what_libvirt_says_of_it(self) -> None:
        self.start()
        self.domain().suspend()
        self.assertEqual({"vm": "paused"}, self.machines.states())
        self.assertIn("'vm' is paused", str(self.assertRaises(VmRuns, self.start, memory=128)))
        self.domain().managedSave()
        self.assertEqual({"vm": "saved"}, self.machines.states())
        state = [libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_UNKNOWN]  # of a libvirt that was started anew
        with mock.patch.object(libvirt.virDomain, "state", return_value=state):
            self.assertIs(False, self.machines.went("vm"))
        asleep = mock.Mock(state=lambda: (libvirt.VIR_DOMAIN_PMSUSPENDED, 0))
        self.assertEqual("pmsuspended", RunningVm("vm", asleep).state)


class ForeignTest(MachinesTest):
    """A domain that another agent defined, beside one of ours."""

    def setUp(self) -> None:
        super().setUp()
        self.of("there").start(Identity("theirs", str(uuid4()), []), self.disk, BOOT)
        self.start()
        self.domain().destroy()

    def test_it_is_not_ours_and_nothing_is_done_with_it(self) -> None:
        before = {path: path.read_bytes() for path in self.seed().parent.iterdir()}
        for act in (
            lambda: self.start("theirs"),
            lambda: self.machines.rename("vm", "theirs"),
            lambda: self.machines.expect("theirs", self.disk, TRAVELLER),
        ):
            self.assertThat(str(self.assertRaises(DomainForeign, act)), Contains("'theirs'"))
        self.assertRaises(UnknownVm, self.machines.stop, "theirs", force=True)
        self.machines.follow("theirs", Device(1 << 20, Path("/dev/mapper/other")))
        with self.machines.running_vm("theirs") as running:
            self.assertIsNone(running)
        self.assertEqual({"vm": "off"}, self.machines.states())
        self.assertIsNone(self.machines.machine("theirs"))
        self.assertEqual(before, {path: path.read_bytes() for path in self.seed().parent.iterdir()})
        self.assertThat(self.domain("theirs").XMLDesc(), Not(Contains("/dev/mapper/other")))
        self.machines.remove("theirs")
        self.assertTrue(self.domain("theirs").isActive())


class NoLibvirtTest(TestCase):
    def test_a_libvirt_that_does_not_answer_is_named(self) -> None:
        folder = folder_for(self)
        uri = f"qemu+unix:///system?socket={folder}/none"
        machines = LibvirtMachines(uri, "here", folder, "tcg")
        for call in (machines.states, lambda: machines.remove("vm"), lambda: machines.stop("vm", force=True)):
            error = self.assertRaises(HypervisorError, call)
            self.assertThat(str(error), Contains(uri))


class RunningTest(MachinesTest):
    def definition(self) -> str:
        return str(self.domain().XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))

    def test_what_others_start_later_begins_with_the_new_disk(self) -> None:
        self.start(memory=128)
        self.assertThat(self.definition(), Not(Contains("/dev/mapper/other")))
        self.machines.follow("vm", Device(self.disk.size, Path("/dev/mapper/other")))  # what this libvirt remembers
        self.assertThat(self.definition(), Contains("/dev/mapper/other"))
        self.assertEqual(BOOT.model_copy(update={"memory": 128}), self.machines.machine("vm"))

    def test_a_guest_is_frozen_if_it_can_be(self) -> None:
        self.start()
        with self.machines.running_vm("vm") as running:
            assert running is not None
            self.assertFalse(running.freeze(), "no agent answers")
            with mock.patch.object(libvirt_qemu, "qemuAgentCommand"):
                self.assertTrue(running.freeze())
                self.domain().destroy()
                self.assertFalse(running.freeze())
            running.thaw()


class FrozenTest(TestCase):
    """A guest that libvirt fails to freeze and to thaw."""

    def setUp(self) -> None:
        super().setUp()
        self.domain = mock.Mock()
        self.domain.fsFreeze.side_effect = self.domain.fsThaw.side_effect = libvirt.libvirtError("no answer")
        self.running = RunningVm("vm", self.domain)
        self.ping = self.enterContext(mock.patch.object(libvirt_qemu, "qemuAgentCommand"))
        none = libvirt.libvirtError("none")
        self.enterContext(mock.patch.object(libvirt_qemu, "qemuMonitorCommand", side_effect=none))

    def agent(self, state: str) -> None:
        target = f"<target type='virtio' name='org.qemu.guest_agent.0' state='{state}'/>"
        self.domain.XMLDesc.return_value = f"<domain><devices><channel>{target}</channel></devices></domain>"

    def test_one_without_an_agent_is_not_held_still(self) -> None:
        self.agent("disconnected")
        self.assertFalse(self.running.freeze())
        self.running.thaw()

    def test_one_whose_agent_does_not_answer_may_be(self) -> None:
        self.agent("connected")
        self.assertRaises(HypervisorError, self.running.freeze)
        self.assertRaises(HypervisorError, self.running.thaw)

    def test_an_agent_that_answers_nothing_at_all_is_not_asked(self) -> None:
        self.agent("connected")
        self.ping.side_effect = libvirt.libvirtError("no answer")
        self.assertFalse(self.running.freeze())
        self.domain.fsFreeze.assert_not_called()
