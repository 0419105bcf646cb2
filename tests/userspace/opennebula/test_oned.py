"""What oned does around its drivers: which scripts it calls, with which states, and what failures leave."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from lab.opennebula import Disk, Image, Vm
from lab.opennebula.pool import Lcm, State
from tests.userspace.opennebula.stand import WITH_SOURCE, StandTestCase

pytestmark = pytest.mark.long


class OnedContract:
    """What holds for both drivers; a mixin of tests."""

    class Test(StandTestCase):
        def setUp(self) -> None:
            super().setUp()
            self.one.system_datastore(0, "probe")
            self.one.image_datastore(100, "probe", "probe", TM_MAD_SYSTEM="ssh,local")
            self.home = f"host-1:{self.datastores}/0/0"
            for script in ("cp", "mkfs", "clone"):
                self.probe.answers(script, "echo /source/new raw")
            self.probe.answers("stat", "echo 12")

        def running(self) -> Vm:
            vm = self.one.vm([Disk(0, "/source/a", 10, 10, "probe", 100, 1)])
            self.assertTrue(self.one.deploy(vm, "host-1", 0).ok)
            return vm

        def last(self) -> str:
            return self.probe.lines()[-1]

        def see_state(self, script: str) -> None:
            """Let a script fail with what onevm says."""
            self.probe.answers(script, "onevm show -x 0 >&2; exit 1")

        def seen(self, reason: str, path: str) -> str | None:
            return ET.fromstring(reason).findtext(path)

        def test_an_image_is_added_by_its_size_and_a_copy(self) -> None:
            image = Image(4, 100, "/path with blanks")
            self.assertTrue(self.one.add_image(image).ok)
            self.assertEqual((12, "/source/new", "raw"), (image.size, image.source, image.format))
            self.assertEqual(["stat 4", "cp 4"], self.probe.lines())

        def test_actions_on_an_image(self) -> None:
            image = Image(4, 100, source="/source/a")
            self.assertTrue(self.one.image_action("snap_revert", image, 2).ok)
            self.assertEqual("snap_revert 4", self.last())
            self.one.images[4] = image
            self.assertTrue(self.one.remove_image(image).ok)
            self.assertEqual({}, self.one.images)

        def test_an_image_for_the_marketplace(self) -> None:
            export = self.frontend.remotes / "datastore" / "probe" / "export"
            export.write_text("#!/bin/sh\necho '<IMPORT_INFO>'; echo '<SIZE>3</SIZE></IMPORT_INFO>'\n")
            export.chmod(0o755)
            self.assertEqual("3", self.one.export_image(Image(4, 100)).findtext("SIZE"))

        def test_deploy_has_a_context_and_the_vms_xml(self) -> None:
            vm = self.one.vm([Disk(0, "/source/a", 10, 10, "probe", 100, 1)])
            vm.context = str(self.note("context.sh", "x"))
            self.assertTrue(self.one.deploy(vm, "host-1", 0).ok)
            self.assertEqual(f"context {vm.context} {self.home}/disk.1 0 0", self.last())
            self.assertTrue((self.frontend.datastores("host-1") / "0" / "0" / "vm.xml").exists())
            self.probe.answers("context", "exit 1")
            self.assertFalse(self.one.recreate(vm, "host-1", 0).ok)
            self.assertEqual(Lcm.BOOT_FAILURE, vm.lcm)

        def test_snapshots_while_it_runs_and_while_it_is_off(self) -> None:
            vm = self.running()
            end = f"{self.home}/disk.0 0 0 100"
            self.assertTrue(self.one.snapshot_create(vm, 0, 0).ok)
            self.assertEqual(f"snap_create_live {end}", self.last())
            self.one.power_off(vm)
            for act, script in (
                (self.one.snapshot_revert, "snap_revert"),
                (self.one.snapshot_delete, "snap_delete"),
                (self.one.snapshot_create, "snap_create"),
            ):
                self.assertTrue(act(vm, 0, 0).ok)
                self.assertEqual(f"{script} {end}", self.last())
            self.assertEqual(State.POWEROFF, vm.state)
            self.see_state("snap_create")
            answer = self.one.snapshot_create(vm, 0, 1)
            self.assertEqual("51", self.seen(answer.reason, "LCM_STATE"))
            self.assertEqual("YES", self.seen(answer.reason, "TEMPLATE/DISK/DISK_SNAPSHOT_ACTIVE"))
            self.assertEqual([0], vm.disk(0).snapshots)

        def test_a_resize_that_fails(self) -> None:
            vm = self.running()
            self.see_state("resize")
            answer = self.one.resize(vm, 0, 20)
            self.assertEqual(
                ("62", "20"), tuple(self.seen(answer.reason, it) for it in ("LCM_STATE", "TEMPLATE/DISK/SIZE"))
            )
            self.assertEqual(10, vm.disk(0).size)

        def test_save_as(self) -> None:
            vm = self.running()
            self.assertTrue(self.one.save_as(vm, 0, Image(9, 100), 3).ok)
            self.assertEqual(["mkfs 9", f"cpds {self.home}/disk.0 /source/new 3 0 100"], self.probe.lines()[-2:])

        def test_a_disk_that_the_hypervisor_cannot_attach(self) -> None:
            vm = self.running()
            answer = self.one.attach(vm, Disk(4, "/source/b", 1, 1, "probe", 100, 2, clone=False), hypervisor=False)
            self.assertFalse(answer.ok)
            there = f"{self.home}/disk.4"
            self.assertEqual(
                [f"ln frontend:/source/b {there} 0 100", f"mvds {there} /source/b 0 100"], self.probe.lines()[-2:]
            )
            self.assertEqual(1, len(vm.disks))

        def test_a_migration_that_fails_and_is_deleted_on_both_sides(self) -> None:
            vm = self.running()
            self.probe.answers("mv", "exit 1")
            self.assertFalse(self.one.migrate(vm, "host-2").ok)
            self.assertEqual(Lcm.PROLOG_MIGRATE_FAILURE, vm.lcm)
            self.probe.answers("mv", "exit 0")
            self.assertTrue(self.one.recover_retry(vm).ok)
            self.assertEqual(Lcm.RUNNING, vm.lcm)
            self.probe.answers("mv", "exit 1")
            self.one.migrate(vm, "host-1")
            self.assertTrue(self.one.recover_delete(vm).ok)
            hosts = [line.split()[1].partition(":")[0] for line in self.probe.lines()[-4:]]
            self.assertEqual(["host-1", "host-1", "host-2", "host-2"], hosts)

        def test_a_refused_live_migration(self) -> None:
            vm = self.running()
            self.probe.answers("premigrate", "echo not this one >&2; exit 1")
            answer = self.one.live_migrate(vm, "host-2")
            self.assertEqual((False, "not this one"), (answer.ok, answer.reason))
            self.assertEqual(["premigrate", "failmigrate"], [line.split()[0] for line in self.probe.lines()[-2:]])
            self.assertEqual(["host-1", "host-2", "host-1"], [stay.host for stay in vm.history])

        def test_failures_do_not_count_when_a_vm_that_runs_is_deleted(self) -> None:
            vm = self.running()
            self.probe.answers("delete", "exit 1")
            self.assertTrue(self.one.recover_delete(vm).ok)
            self.assertEqual([f"delete {self.home}/disk.0 0 100", f"delete {self.home} 0 0"], self.probe.lines()[-2:])
            self.assertEqual(State.DONE, vm.state)

        def test_a_backup(self) -> None:
            vm = self.running()
            self.assertTrue(self.one.backup(vm, [0]).ok)
            before, after = self.probe.calls()[-2:]
            self.assertEqual(f"prebackup_live {self.home} 0 one-0 - 0 0", before.line)
            self.assertNotIn("BACKUP_RESULT", str(after["stdin"]))
            self.one.power_off(vm)
            self.assertFalse(self.one.backup(vm, [0], lambda: False).ok)
            self.assertEqual(f"postbackup {self.home} 0 one-0 - 0 0", self.last())
            self.assertIn("<BACKUP_RESULT>FAILURE", str(self.probe.calls()[-1]["stdin"]))
            self.assertTrue(self.one.restore(vm, 9).ok)
            self.assertEqual(f"restore {self.home} 0 9 -1 -1", self.last())

        def test_a_stopped_vm_is_deleted_on_the_front_end(self) -> None:
            vm = self.running()
            self.assertTrue(self.one.stop(vm).ok)
            self.assertTrue(self.one.terminate(vm).ok)
            self.assertEqual(f"delete frontend:{self.datastores}/0/0 0 0", self.last())


class PythonTest(OnedContract.Test):
    pass


if WITH_SOURCE:

    class RubyTest(OnedContract.Test):
        kind = "ruby"
