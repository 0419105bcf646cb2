"""The life of VMs through the system transfer manager ``ssh`` and datastore ``fs``: stand-ins, and the real ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lab.opennebula import Image, Vm
from lab.opennebula.pool import Lcm, State
from tests.userspace.opennebula.stand import WITH_SOURCE, StandTestCase

pytestmark = pytest.mark.long

SIZE = 3
"""MiB of an image."""


class LifeContract:
    """What holds for the stand-ins and for the real drivers; a mixin of tests."""

    class Test(StandTestCase):
        def setUp(self) -> None:
            super().setUp()
            self.one.system_datastore(0)
            self.one.system_datastore(1)
            self.one.image_datastore(100, "ssh", "fs", SAFE_DIRS="/", TM_MAD_SYSTEM="")
            self.content = os.urandom(SIZE << 20)
            (self.folder / "image").write_bytes(self.content)

        def image(self, number: int = 1, *, persistent: bool = False) -> Image:
            image = Image(number, 100, str(self.folder / "image"), persistent=persistent)
            self.assert_ok(self.one.add_image(image))
            return image

        def running(self, *images: Image) -> Vm:
            vm = self.one.vm([self.one.disk_of(image, place) for place, image in enumerate(images)])
            self.assert_ok(self.one.deploy(vm, "host-1", 0))
            return vm

        def assert_ok(self, answer) -> None:  # type: ignore[no-untyped-def]
            self.assertTrue(answer.ok, f"{answer.info} {answer.log}")

        def path(self, vm: Vm, disk: int = 0) -> str:
            return f"{self.one.lines.folder(vm)}/disk.{disk}"

        def read(self, vm: Vm, disk: int = 0, host: str = "") -> bytes:
            return self.frontend.seen(host or vm.here.host, self.path(vm, disk)).read_bytes()

        def write(self, vm: Vm, content: bytes, disk: int = 0) -> bytes:
            self.frontend.seen(vm.here.host, self.path(vm, disk)).write_bytes(content)
            return content

        def vm_folder(self, host: str, vm: Vm) -> Path:
            return self.frontend.seen(host, self.one.lines.folder(vm))

        def test_an_image_is_added_cloned_and_removed(self) -> None:
            image = self.image()
            self.assertEqual(SIZE, image.size)
            self.assertEqual(self.content, Path(image.source).read_bytes())
            copy = Image(2, 100)
            self.assert_ok(self.one.clone_image(copy, image))
            self.assertEqual(self.content, Path(copy.source).read_bytes())
            self.assert_ok(self.one.remove_image(image))
            self.assertFalse(Path(image.source).exists())
            self.assertGreater(self.one.monitor(self.one.stores[100])["TOTAL_MB"], 0)

        def test_from_deploy_to_terminate(self) -> None:
            image, kept = self.image(1), self.image(2, persistent=True)
            vm = self.one.vm([self.one.disk_of(image, 0), self.one.disk_of(kept, 1)])
            vm.disks[0].size = SIZE + 2
            self.assert_ok(self.one.deploy(vm, "host-1", 0))
            self.assertEqual((Lcm.RUNNING, self.content + bytes(2 << 20)), (vm.lcm, self.read(vm)))
            self.one.power_off(vm)
            self.assert_ok(self.one.resize(vm, 0, SIZE + 3))
            self.assertEqual((SIZE + 3) << 20, len(self.read(vm)))
            data = self.write(vm, os.urandom(SIZE << 20))
            saved = Image(5, 100)
            self.assert_ok(self.one.save_as(vm, 0, saved))
            self.assertEqual(data, Path(saved.source).read_bytes())
            self.write(vm, b"kept", 1)
            self.assert_ok(self.one.terminate(vm))
            self.assertEqual(State.DONE, vm.state)
            self.assertEqual(self.content, Path(image.source).read_bytes())
            self.assertEqual(b"kept", Path(kept.source).read_bytes())
            self.assertFalse(self.vm_folder("host-1", vm).exists())

        def test_to_the_front_end_to_another_host_and_to_another_datastore(self) -> None:
            vm = self.running(self.image())
            data = self.write(vm, b"data")
            for leave, state in ((self.one.stop, State.STOPPED), (self.one.undeploy, State.UNDEPLOYED)):
                self.assert_ok(leave(vm))
                self.assertEqual((state, data), (vm.state, self.read(vm, host="frontend")))
                self.assertFalse(self.vm_folder(vm.here.host, vm).exists())
                self.assert_ok(self.one.resume(vm, "host-2", 0))
                self.assertEqual((Lcm.RUNNING, data), (vm.lcm, self.read(vm)))
            there = self.vm_folder("host-1", vm)
            there.mkdir(parents=True)
            (there / "disk.7").write_text(
                "made by another driver: the move of the folder loses what lies at its target"
            )
            self.assert_ok(self.one.migrate(vm, "host-1"))
            self.assertEqual((data, False), (self.read(vm), (there / "disk.7").exists()))
            self.assertFalse(self.vm_folder("host-2", vm).exists())
            self.one.power_off(vm)
            self.assert_ok(self.one.migrate(vm, "host-1", 1))
            self.assertEqual((State.POWEROFF, data), (vm.state, self.read(vm)))
            self.assertTrue(self.path(vm).startswith(f"{self.frontend.datastores()}/1/"))

        def test_live_migration_copies_files_and_links_and_is_refused_where_a_link_dangles(self) -> None:
            own, both = self.folder / "private" / "host-1" / "device", self.folder / "both"
            for target in (own, both):
                target.write_text("another VM's disk, perhaps")
            vm = self.running(self.image())
            link = self.vm_folder("host-1", vm) / "disk.1"
            link.symlink_to(own)
            self.assertIn("disk.1", self.one.live_migrate(vm, "host-2").reason)
            self.assertEqual(("host-1", Lcm.RUNNING, self.content), (vm.here.host, vm.lcm, self.read(vm)))
            self.assertFalse(self.vm_folder("host-2", vm).exists())
            link.unlink()
            link.symlink_to(both)
            self.assert_ok(self.one.live_migrate(vm, "host-2"))
            self.assertEqual(("host-2", self.content), (vm.here.host, self.read(vm)))
            self.assertEqual(both, (self.vm_folder("host-2", vm) / "disk.1").readlink())
            self.assertFalse(self.vm_folder("host-1", vm).exists())

        def test_a_failed_deploy_is_tried_again_and_deleted(self) -> None:
            vm = self.one.vm([self.one.disk_of(self.image(), 0)])
            self.frontend.exchange.down("host-1")
            answer = self.one.deploy(vm, "host-1", 0)
            self.assertFalse(answer.ok)
            self.assertEqual(Lcm.PROLOG_FAILURE, vm.lcm)
            self.frontend.exchange.up("host-1")
            self.assert_ok(self.one.recover_retry(vm))
            self.assertEqual(Lcm.RUNNING, vm.lcm)
            self.assert_ok(self.one.recreate(vm, "host-2", 0))
            self.assertEqual((self.content, "host-2"), (self.read(vm), vm.here.host))
            self.assert_ok(self.one.recover_delete(vm))
            self.assertEqual(State.DONE, vm.state)
            self.assertFalse(self.vm_folder("host-2", vm).exists())


class PythonTest(LifeContract.Test):
    pass


if WITH_SOURCE:

    class RubyTest(LifeContract.Test):
        kind = "ruby"
