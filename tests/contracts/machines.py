"""What a hypervisor has to do, whoever is behind it: held to it are libvirt and the double of the agent's tests."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID, uuid4

from testtools import TestCase

from drivers.base import Device
from drivers.errors import MonitorFailed
from virtman.errors import UnknownVm, VmRuns, VmSaved
from virtman.hypervisor import Machines
from virtman.models import MigrationSource
from virtman.records import Boot
from virtman.seed import Identity

BOOT = Boot(memory=64, cpus=1, network="none")
NO_KEYS: list[str] = []
ID = str(uuid4())
MORE = Device(1 << 20, Path("/dev/mapper/more"))


class MachinesContract(TestCase):
    """A case sets ``machines`` and ``disk``."""

    machines: Machines
    disk: Device

    def files(self) -> list[str]:
        """Names of the VMs that there are files for, besides their disks."""
        raise NotImplementedError

    def begins_with(self, vm: str) -> list[str]:
        """Names of the disks that a VM is started with by others, besides its own."""
        raise NotImplementedError

    def running(self) -> list[str]:
        """Names of the VMs that run."""
        raise NotImplementedError

    def come(self, vm: str, domain: str) -> None:
        """Have the memory of a VM that is expected come: it is there, and paused."""
        raise NotImplementedError

    def pause(self, vm: str) -> None:
        """Have a VM that runs stand still."""
        raise NotImplementedError

    def paused(self, vm: str) -> bool:
        """Whether a VM stands still."""
        raise NotImplementedError

    def save(self, vm: str) -> None:
        """Have the hypervisor save the memory of a VM that runs."""
        raise NotImplementedError

    def start(
        self, vm: str = "vm", boot: Boot = BOOT, keys: list[str] | None = NO_KEYS, user_data: str | None = None
    ) -> None:
        self.machines.start(Identity(vm, str(uuid4()), keys, user_data), self.disk, boot)

    def test_a_running_vm_is_not_started_with_another_machine(self) -> None:
        self.start()
        for other in ({"memory": 128}, {"cpus": 2}, {"network": "user"}):
            self.assertRaises(VmRuns, self.start, boot=BOOT.model_copy(update=other))
        self.assertEqual((["vm"], BOOT), (self.running(), self.machines.machine("vm")))

    def test_a_running_vm_is_not_started_with_other_keys_or_user_data(self) -> None:
        self.start(keys=["key"], user_data="#cloud-config\n")
        for keys, user_data in ((["other"], "#cloud-config\n"), (["key"], None), ([], "#!/bin/sh\n")):
            self.assertRaises(VmRuns, self.start, keys=keys, user_data=user_data)

    def test_a_running_vm_may_be_started_again_as_it_runs(self) -> None:
        for _ in range(2):
            self.start(keys=["key"], user_data="#cloud-config\n")
        self.start()
        self.assertEqual((["vm"], ["vm"], BOOT), (self.running(), self.files(), self.machines.machine("vm")))
        self.assertIsNone(self.machines.machine("other"))

    def test_a_running_vm_is_left_alone_by_a_start_without_keys(self) -> None:
        self.start(keys=["key"])
        self.start(boot=BOOT.model_copy(update={"memory": 128}), keys=None)
        self.assertEqual(BOOT, self.machines.machine("vm"))

    def test_a_vm_that_is_removed_is_gone_with_its_files_and_no_other_one(self) -> None:
        self.start()
        self.start("other")
        self.machines.remove("vm")
        self.assertEqual((["other"], ["other"]), (self.running(), self.files()))
        self.assertIsNone(self.machines.machine("vm"))

    def test_what_is_not_there_can_be_removed(self) -> None:
        self.machines.remove("vm")
        self.start()
        for _ in range(2):
            self.machines.remove("vm")
        self.assertEqual(([], []), (self.running(), self.files()))

    def test_a_command_that_qemu_refuses_is_an_error_of_its_own(self) -> None:
        self.start()
        with self.machines.running_vm("vm") as running:
            assert running is not None
            self.assertRaises(MonitorFailed, running.execute, "no-such-command")

    def test_a_guest_that_was_not_held_still_may_be_told_to_go_on(self) -> None:
        self.start()
        with self.machines.running_vm("vm") as running:
            assert running is not None
            running.thaw()

    def test_a_vm_that_is_off_gets_another_name_with_its_files(self) -> None:
        self.start(keys=["key"])
        self.machines.stop("vm", force=True)
        for _ in range(2):
            self.machines.rename("vm", "new")
            self.machines.follow("new", self.disk)
        self.assertEqual(["new"], self.files())
        self.start("new", keys=None)
        self.assertEqual((["new"], ["new"]), (self.running(), self.files()))
        self.assertIsNone(self.machines.machine("vm"))
        self.machines.start(Identity("vm", ID, []), self.disk, BOOT)
        self.assertEqual(["new", "vm"], self.running())

    def uuid(self, vm: str = "vm") -> str:
        """The UUID that it has."""
        return str(self.machines.migration_source(vm).uuid)

    def test_a_vm_has_the_uuid_that_it_is_first_started_with(self) -> None:
        for given in (ID, str(uuid4())):
            self.machines.start(Identity("vm", given, []), self.disk, BOOT)
            self.assertEqual(ID, self.uuid())
            self.machines.stop("vm", force=True)
        self.machines.rename("vm", "new")
        self.machines.follow("new", self.disk)
        self.assertEqual(ID, self.uuid("new"))

    def test_a_vm_that_was_forgotten_gets_the_uuid_that_is_given(self) -> None:
        self.machines.start(Identity("vm", str(uuid4()), []), self.disk, BOOT)
        self.machines.stop("vm", force=True)
        self.machines.undefine("vm")
        self.machines.start(Identity("vm", ID), self.disk, BOOT)
        self.assertEqual(ID, self.uuid())

    def test_a_vm_that_runs_keeps_its_name(self) -> None:
        self.start()
        self.assertRaises(VmRuns, self.machines.rename, "vm", "new")
        self.assertEqual((["vm"], ["vm"]), (self.running(), self.files()))

    def test_a_vm_that_was_never_started_may_get_another_name(self) -> None:
        self.machines.rename("vm", "new")
        self.machines.follow("new", self.disk)
        self.assertEqual(([], []), (self.running(), self.files()))

    def test_a_vm_whose_power_is_cut_is_off_and_can_be_started_again(self) -> None:
        self.assertRaises(UnknownVm, self.machines.stop, "vm", force=True)
        self.start()
        for _ in range(2):
            self.machines.stop("vm", force=True)
            self.assertEqual((False, ["vm"], BOOT), (self.runs(), self.files(), self.machines.machine("vm")))
        self.start(keys=None)
        self.assertTrue(self.runs())

    def runs(self) -> bool:
        """Whether the VM runs."""
        with self.machines.running_vm("vm") as running:
            return running is not None

    def test_a_vm_with_saved_memory_is_neither_on_nor_off(self) -> None:
        self.start()
        self.save("vm")
        self.assertRaises(VmSaved, self.runs)
        self.assertRaises(VmSaved, self.machines.rename, "vm", "new")
        self.assertRaises(VmSaved, self.machines.stop, "vm", force=False)
        self.assertEqual((False, BOOT, ["vm"]), (self.machines.went("vm"), self.machines.machine("vm"), self.files()))

    def test_a_vm_with_saved_memory_goes_on_as_it_was_or_not_at_all(self) -> None:
        self.start(keys=["key"])
        self.save("vm")
        self.assertRaises(VmRuns, self.start, boot=BOOT.model_copy(update={"memory": 128}))
        self.assertRaises(VmRuns, self.start, keys=["other"])
        self.assertRaises(VmSaved, self.runs)
        self.start(keys=None)
        self.assertEqual((True, BOOT), (self.runs(), self.machines.machine("vm")))

    def test_saved_memory_goes_when_the_power_is_cut_and_when_the_vm_is_removed(self) -> None:
        for _ in range(2):
            self.start()
            self.save("vm")
            self.machines.stop("vm", force=True)
            self.assertFalse(self.runs())
        self.start()
        self.save("vm")
        self.machines.remove("vm")
        self.assert_not_known(files=[])

    def test_a_vm_begins_with_all_its_disks(self) -> None:
        self.machines.start(Identity("vm", ID, []), self.disk, BOOT, {"data": MORE})
        self.assertEqual(["data"], self.begins_with("vm"))
        for names in (["data", "more"], ["more"], []):
            self.machines.follow("vm", self.disk, dict.fromkeys(names, MORE))
            self.assertEqual(names, self.begins_with("vm"))
        self.assertEqual(BOOT, self.machines.machine("vm"))

    def test_another_disk_changes_nothing_of_a_vm_that_runs_or_is_not_there(self) -> None:
        self.machines.follow("vm", self.disk)
        self.start()
        self.machines.follow("vm", self.disk)
        self.assertEqual((["vm"], BOOT), (self.running(), self.machines.machine("vm")))

    def test_a_vm_that_was_forgotten_is_not_known_and_has_its_files(self) -> None:
        self.machines.undefine("vm")
        self.start()
        self.machines.stop("vm", force=True)
        for _ in range(2):
            self.machines.undefine("vm")
            self.assert_not_known(files=["vm"])
        self.machines.remove("vm")
        self.assert_not_known(files=[])

    def assert_not_known(self, files: list[str]) -> None:
        """There is no VM, but files."""
        self.assertIsNone(self.machines.machine("vm"))
        self.assertIsNone(self.machines.went("vm"))
        self.assertFalse(self.runs())
        self.assertRaises(UnknownVm, self.machines.migration_source, "vm")
        self.assertRaises(UnknownVm, self.machines.stop, "vm", force=True)
        self.machines.end_migration("vm")
        self.assertEqual(files, self.files())

    def test_a_vm_that_was_not_moved_did_not_go(self) -> None:
        self.start()
        self.assertIs(False, self.machines.went("vm"))
        self.machines.stop("vm", force=True)
        self.assertIs(False, self.machines.went("vm"))
        self.machines.end_migration("vm")

    def test_only_a_vm_that_stands_still_is_let_go_on(self) -> None:
        self.start()
        self.go_on()
        self.pause("vm")
        self.go_on()
        self.assertEqual((False, ["vm"]), (self.paused("vm"), self.running()))

    def go_on(self) -> None:
        """Let the VM go on."""
        with self.machines.running_vm("vm") as running:
            assert running is not None
            running.go_on()

    def test_a_vm_that_is_expected_is_not_there_yet(self) -> None:
        migration_source = self.migration_source()
        self.assertEqual(
            self.machines.expect("vm", self.disk, migration_source),
            self.machines.expect("vm", self.disk, migration_source),
        )
        self.assert_not_known(files=["vm"])
        self.machines.remove("vm")
        self.assert_not_known(files=[])

    def migration_source(self) -> MigrationSource:
        """One that comes, whose machine is that of another one."""
        self.start("other", keys=["key"])
        other = self.machines.migration_source("other")
        self.machines.remove("other")
        return other.model_copy(update={"uuid": UUID(ID)})

    def test_a_vm_that_comes_is_what_it_was_and_stands_still_until_it_is_let_go_on(self) -> None:
        migration_source = self.migration_source()
        self.come("vm", self.machines.expect("vm", self.disk, migration_source))
        self.assertEqual((True, True, BOOT), (self.runs(), self.paused("vm"), self.machines.machine("vm")))
        self.assertEqual(migration_source, self.machines.migration_source("vm"))
        self.go_on()
        self.assertFalse(self.paused("vm"))
        self.machines.stop("vm", force=True)
        self.start(keys=None)
        self.assertEqual(ID, self.uuid())
        self.machines.remove("vm")
        self.assert_not_known(files=[])
