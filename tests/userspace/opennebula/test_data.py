"""No data are lost or mixed up: what is stale never wins, and two calls at once destroy nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lab.opennebula import Answer, Fate, Image, Vm
from tests.userspace.opennebula.cloud import BASE, OTHER_SYSTEM, SYSTEM, CloudTestCase

STEP = " virtman 600 virtman "


class DataTest(CloudTestCase):
    system = "virtman"

    def started(self, image: Image) -> Vm:
        """A VM on host-1 that is off and has written a 1."""
        vm = self.vm(image)
        self.ok(self.one.deploy(vm, "host-1", SYSTEM))
        self.one.power_off(vm)
        self.write(vm, 0, 1)
        return vm

    def lose_answer(self, action: str, act: Callable[[], Answer]) -> None:
        """Have all be done on the host, and the driver not told."""
        fault = self.frontend.exchange.plan(Fate.CUT, matching=f"{STEP}{action} ")
        self.assertFalse(act().ok)
        self.assertTrue(fault.happened.is_set())
        self.frontend.exchange.settle()

    def resumed_by_an_operator(self, vm: Vm) -> None:
        """Undeployed, and on host-1 again, though OpenNebula had to be told so: the front end's copy stays."""
        self.ok(self.one.undeploy(vm))
        self.lose_answer("receive", lambda: self.one.deploy(vm, "host-1", SYSTEM))
        self.one.power_on(vm)
        self.write(vm, 0, 2)
        self.one.power_off(vm)

    def streams(self) -> list[str]:
        """What the front end has of disks of stopped VMs."""
        return [str(path) for path in self.frontend.datastores().glob("*/.virtman/*")]

    def test_what_was_stopped_once_does_not_win_over_a_persistent_disk(self) -> None:
        image = self.add_image(7, persistent=True)
        vm = self.started(image)
        self.resumed_by_an_operator(vm)
        self.lose_answer("destroy", lambda: self.one.terminate(vm))
        self.ok(self.one.recover_retry(vm))
        other = self.vm(image, number=43)
        self.ok(self.one.deploy(other, "host-2", SYSTEM))
        self.reads(other, 0, 2)

    def test_what_was_stopped_in_another_datastore_goes_with_the_vm_and_when_it_is_made_anew(self) -> None:
        image = self.add_image(7)
        for made_anew in (False, True):
            vm = self.started(image)
            self.ok(self.one.undeploy(vm))
            self.frontend.exchange.down("host-1")
            self.assertFalse(self.one.deploy(vm, "host-1", OTHER_SYSTEM).ok)
            self.frontend.exchange.up("host-1")
            if made_anew:
                self.ok(self.one.recreate(vm, "host-1", OTHER_SYSTEM))
                self.reads(vm, 0, BASE)
            else:
                self.ok(self.one.recover_delete(vm))
            self.assertEqual([], self.streams())

    def test_a_late_migration_destroys_nothing(self) -> None:
        vm = self.started(self.add_image(7))
        late = self.frontend.exchange.plan(Fate.LATE, matching=f"{STEP}forward ")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.one.migrate, vm, "host-2", SYSTEM)
            late.wait()
            try:
                self.ok(self.one.recover_retry(vm))
            finally:
                late.release()
        self.refused(answer.result(), "is not on this host")
        self.reads(vm, 0, 1)

    def test_a_guest_that_froze_late_is_thawed(self) -> None:
        vm = self.vm(self.add_image(7))
        self.ok(self.one.deploy(vm, "host-1", SYSTEM))
        calls = self.folder / "virsh.log"
        calls.touch()
        calls.chmod(0o666)
        virsh = self.frontend.folder / "hosts" / "host-1" / "bin" / "virsh"
        virsh.write_text(f'#!/bin/sh\necho "$3" >> {calls}\n[ "$3" != domfsfreeze ]\n')
        virsh.chmod(0o755)
        self.ok(self.one.snapshot_create(vm, 0, 0))
        self.assertEqual(["domfsfreeze", "domfsthaw"], calls.read_text().split())
