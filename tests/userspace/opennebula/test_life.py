"""The life of VMs and images, by OpenNebula's drivers and our scripts alone."""

from __future__ import annotations

import base64
import hashlib
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab.opennebula import Disk, Image, Vm
from lab.tools import run
from opennebula_tm.driver.placement import report
from tests.patience import wait_until
from tests.programs import qemu_io
from tests.userspace.opennebula.cloud import BASE, IMAGE_MIB, IMAGES, MIB, OTHER_SYSTEM, SYSTEM, CloudTestCase
from tests.userspace.opennebula.stand import WITH_SOURCE


class LifeContract:
    """What holds with both drivers and all system datastores; a mixin of tests."""

    class Test(CloudTestCase):
        def test_a_vm_from_its_first_day_to_its_last(self) -> None:
            image, second = self.add_image(7), self.add_image(8, byte=0x33)
            vm = self.vm(image, second, grow=4)
            vm.disks.append(Disk(2, size=1, type="fs", format="raw"))
            self.ok(self.one.deploy(vm, "host-1", SYSTEM))
            self.link(vm, 2).write_bytes(b"volatile")
            self.reads(vm, 0, BASE)
            self.reads(vm, 1, 0x33)
            self.reads(vm, 0, 0, (IMAGE_MIB + 3) * MIB)  # it has grown
            self.one.power_off(vm)

            self.write(vm, 0, 1)
            self.ok(self.one.snapshot_create(vm, 0, 0))
            self.write(vm, 0, 2)
            self.ok(self.one.snapshot_revert(vm, 0, 0))
            self.reads(vm, 0, 1)
            self.ok(self.one.resize(vm, 0, 16))
            self.io(vm, 0, "write -P 9 15M 64k")

            saved = Image(9, IMAGES)
            self.ok(self.one.save_as(vm, 0, saved))
            other = self.vm(saved, number=43)
            self.ok(self.one.deploy(other, "host-2", SYSTEM))
            self.reads(other, 0, 1)
            self.io(other, 0, "read -P 9 15M 64k")
            self.ok(self.one.terminate(other))

            self.ok(self.one.migrate(vm, "host-2", SYSTEM))
            self.reads(vm, 0, 1)
            self.reads(vm, 1, 0x33)
            self.ok(self.one.snapshot_delete(vm, 0, 0))
            for host, datastore in (("host-2", OTHER_SYSTEM), ("host-1", SYSTEM)):
                self.ok(self.one.migrate(vm, host, datastore))
                self.reads(vm, 0, 1)
                self.assertEqual(b"volatile", self.link(vm, 2).read_bytes())
            self.ok(self.one.stop(vm))
            self.assertEqual(set(), self.disks()["host-1"])
            self.ok(self.one.resume(vm, "host-1", OTHER_SYSTEM))
            self.reads(vm, 0, 1)
            self.assertEqual(b"volatile", self.link(vm, 2).read_bytes())
            self.ok(self.one.undeploy(vm))
            self.ok(self.one.resize(vm, 0, 20))
            self.ok(self.one.deploy(vm, "host-2", OTHER_SYSTEM))
            self.reads(vm, 0, 1)
            self.io(vm, 0, "write -P 9 19M 64k")
            self.ok(self.one.terminate(vm))
            self.nothing_left()
            for one in (image, second, saved):
                self.ok(self.one.remove_image(one))
            self.assertEqual([], [path.name for path in self.store.base.iterdir()])

        def test_a_persistent_image_keeps_what_its_vms_wrote(self) -> None:
            image, plain = self.add_image(7, persistent=True), self.add_image(8)
            vm = self.vm(image, plain)
            self.ok(self.one.deploy(vm, "host-1", SYSTEM))
            self.write(vm, 0, 1)
            self.ok(self.one.terminate(vm))
            again = self.vm(image, number=43)
            self.ok(self.one.deploy(again, "host-2", SYSTEM))
            self.reads(again, 0, 1)
            self.write(again, 0, 2)
            self.ok(self.one.undeploy(again))
            self.ok(self.one.resize(again, 0, 8))
            self.ok(self.one.terminate(again))
            self.assertEqual([set(), set(), set()], [names - self.kept() for names in self.disks().values()])

            image.persistent = False
            third = self.vm(image, number=44)
            self.ok(self.one.deploy(third, "host-2", SYSTEM))
            self.reads(third, 0, 2)
            self.reads(third, 0, 0, 7 * MIB)
            self.ok(self.one.terminate(third))
            self.nothing_left()

        def kept(self) -> set[str]:
            """Disks that wait for the next VM of a persistent image."""
            return {name for names in self.disks().values() for name in names if "-k" in name}

        def test_a_disk_that_is_attached_and_detached_while_the_vm_runs(self) -> None:
            image, data = self.add_image(7), self.add_image(8, persistent=True)
            vm = self.vm(image)
            self.ok(self.one.deploy(vm, "host-1", SYSTEM))
            disk = self.one.disk_of(data, 1, self.system, DRIVER="qcow2")
            self.ok(self.one.attach(vm, disk))
            self.write(vm, 1, 1)
            self.ok(self.one.detach(vm, 1))
            self.ok(self.one.attach(vm, self.one.disk_of(data, 1, self.system, DRIVER="qcow2")))
            self.reads(vm, 1, 1)
            self.ok(self.one.terminate(vm))

        def with_two_snapshots(self) -> tuple[Image, Vm]:
            """A persistent image, and a VM with it that wrote a 1 before one snapshot, and a 2 before another."""
            image = self.add_image(7, persistent=True)
            vm = self.vm(image)
            self.ok(self.one.deploy(vm, "host-1", SYSTEM))
            self.one.power_off(vm)
            for number in (0, 1):
                self.write(vm, 0, number + 1)
                self.ok(self.one.snapshot_create(vm, 0, number))
            return image, vm

        @pytest.mark.long
        def test_images_are_cloned_and_their_snapshots_kept(self) -> None:
            image, vm = self.with_two_snapshots()
            self.write(vm, 0, 9)
            self.ok(self.one.terminate(vm))
            self.ok(self.one.image_action("snap_delete", image, 1))
            self.ok(self.one.image_action("snap_revert", image, 0))
            copy = Image(8, IMAGES)
            self.ok(self.one.clone_image(copy, image))
            image.persistent = False
            vm = self.vm(image, copy, number=43)
            self.ok(self.one.deploy(vm, "host-2", SYSTEM))
            self.reads(vm, 0, 1)
            self.reads(vm, 1, 1)

        def test_a_disk_that_went_back_moves_with_all_its_snapshots(self) -> None:
            image, vm = self.with_two_snapshots()
            self.ok(self.one.snapshot_revert(vm, 0, 0))
            self.ok(self.one.migrate(vm, "host-2"))
            self.ok(self.one.undeploy(vm))
            self.ok(self.one.deploy(vm, "host-1", SYSTEM))
            self.reads(vm, 0, 1)
            self.ok(self.one.terminate(vm))
            again = self.vm(image, number=43)
            self.ok(self.one.deploy(again, "host-2", SYSTEM))
            self.reads(again, 0, 1)
            self.one.power_off(again)
            self.ok(self.one.snapshot_revert(again, 0, 1))
            self.reads(again, 0, 2)
            self.ok(self.one.terminate(again))
            self.ok(self.one.image_action("snap_flatten", image, 0))
            self.ok(self.one.deploy(last := self.vm(image, number=44), "host-1", SYSTEM))
            self.reads(last, 0, 1)
            self.refused(self.one.image_action("snap_revert", image, 1), "has no snapshot 1")

        def test_system_snapshots_are_lost_by_nothing_but_the_end_of_their_vm(self) -> None:
            vm = self.vm(self.add_image(7, persistent=True))
            self.ok(self.one.deploy(vm, "host-1", SYSTEM))
            self.one.power_off(vm)
            path = self.link(vm, 0).readlink()
            for name in ("snap-0", "snap-1"):
                run(["qemu-img", "snapshot", "-c", name, path])
            self.refused(self.one.snapshot_create(vm, 0, 0), "delete snap-0, snap-1 first")
            self.refused(self.one.undeploy(vm), "delete snap-0, snap-1 first")
            self.assertIn("snap-1", run(["qemu-img", "snapshot", "-l", path]))
            self.one.power_off(vm)
            self.ok(self.one.terminate(vm))

        def test_an_image_that_is_deleted_by_force_stays_until_its_last_vm_is_gone(self) -> None:
            image = self.add_image(7)
            vm, undeployed = self.vm(image), self.vm(image, number=43)
            for each in (vm, undeployed):
                self.ok(self.one.deploy(each, "host-1", SYSTEM))
            self.ok(self.one.undeploy(undeployed))
            self.ok(self.one.remove_image(image))
            self.write(vm, 0, 1)
            self.ok(self.one.migrate(vm, "host-2"))
            self.ok(self.one.stop(vm))
            self.ok(self.one.resume(vm, "host-1", SYSTEM))
            self.reads(vm, 0, 1)
            self.ok(self.one.terminate(vm))
            self.one.monitor(self.store)
            self.ok(self.one.deploy(undeployed, "host-2", SYSTEM))
            self.reads(undeployed, 0, BASE)
            self.ok(self.one.terminate(undeployed))
            self.one.monitor(self.store)
            self.assertEqual([], list(self.store.base.iterdir()))
            wait_until(lambda: not self.cluster.agents[0].images(), "the image goes")

        def test_an_image_is_handed_to_a_marketplace(self) -> None:
            image = self.add_image(7)
            about = self.one.export_image(image)
            file = Path(str(about.findtext("IMPORT_SOURCE")))
            self.assertEqual(hashlib.md5(file.read_bytes()).hexdigest(), about.findtext("MD5"))
            self.assertEqual("qcow2", about.findtext("FORMAT"))
            qemu_io(file, f"read -P {BASE} 0 {IMAGE_MIB}M", options=["-r", "-f", "qcow2"])
            run(["sh", "-c", str(about.findtext("DISPOSE_CMD"))])
            self.assertEqual([Path(image.source)], sorted(self.store.base.glob("[!.]*")))
            self.assertEqual([], list(self.store.base.glob("*.export")))


@pytest.mark.long
class WithSshTest(LifeContract.Test):
    system = "ssh"


class WithOurOwnTest(LifeContract.Test):
    system = "virtman"

    def test_a_backup_is_made_and_put_back(self) -> None:
        vm = self.vm(self.add_image(7), self.add_image(8, byte=1), grow=2)
        vm.disks.append(Disk(2, size=1, type="fs", format="raw"))
        self.ok(self.one.deploy(vm, "host-1", SYSTEM))
        self.refused(self.one.backup(vm, [0, 1, 2]), "volatile disks 2 can be backed up only while it is off")
        self.one.power_off(vm)
        self.link(vm, 2).write_bytes(b"volatile" * 512)
        self.write(vm, 0, 2)
        made = self.link(vm, 0).parent / "backup"
        vault = self.folder / "vault"

        def upload() -> bool:
            shutil.copytree(made, vault)
            return True

        self.ok(self.one.backup(vm, [0, 1, 2], upload))
        self.assertFalse(made.exists())
        self.assertEqual({"vm.xml", "disk.0.0", "disk.1.0", "disk.2.0"}, {path.name for path in vault.iterdir()})
        self.assertEqual("42", ElementTree.fromstring(base64.b64decode((vault / "vm.xml").read_text())).findtext("ID"))

        self.write(vm, 0, 3)
        self.ok(self.one.snapshot_create(vm, 0, 0))
        self.write(vm, 0, 4)
        self.write(vm, 1, 4)
        self.link(vm, 2).write_bytes(bytes(4096))
        backup = self.backup_of(vault)
        self.ok(self.one.restore(vm, backup.number, disk=0))
        self.reads(vm, 0, 2)
        self.reads(vm, 0, 0, (IMAGE_MIB + 1) * MIB)
        self.reads(vm, 1, 4)
        self.ok(self.one.restore(vm, backup.number))
        self.reads(vm, 1, 1)
        self.assertEqual(b"volatile" * 512, self.link(vm, 2).read_bytes())
        (vault / "disk.0.0").write_bytes((vault / "disk.0.0").read_bytes()[:-100_000])
        self.refused(self.one.restore(vm, backup.number, disk=0), "what came is no whole backup")
        self.reads(vm, 0, 2)

    def test_hosts_report_the_system_datastore_before_its_first_vm(self) -> None:
        self.one.monitor(self.one.stores[SYSTEM])
        for host in self.cluster.names:
            *_, last = report(None, self.frontend.datastores(host))
            self.assertIn(f"DS = [ ID = {SYSTEM}, USED_MB", last)

    def backup_of(self, vault: Path) -> Image:
        """An image of backups whose datastore's driver lists the files of a folder."""
        self.one.image_datastore(200, "ssh", "vault")
        found = ", ".join(f'"{path.name[5]}": "{path}"' for path in vault.glob("disk.*"))
        script = self.frontend.remotes / "datastore" / "vault" / "ls"
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/sh\n[ \"$1\" = -i ] && echo '{{{found}}}'\n")
        script.chmod(0o755)
        self.one.images[50] = Image(50, 200)
        return self.one.images[50]


if WITH_SOURCE:

    class WithOpenNebulasDriversTest(LifeContract.Test):
        kind = "ruby"

    class WithOpenNebulasDriversAndLocalTest(LifeContract.Test):
        kind, system = "ruby", "local"

    class WithOpenNebulasDriversAndOurOwnTest(LifeContract.Test):
        kind, system = "ruby", "virtman"
