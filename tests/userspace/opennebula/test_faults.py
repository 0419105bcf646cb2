"""Each ssh step fails, is cut off or hangs once; hosts are down, agents restart, calls come twice at once.

After a failure the same action, repeated, ends well, and the data are right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from testtools.matchers import HasLength

from lab.opennebula import Answer, Fate, Image, Vm
from tests.patience import wait_until
from tests.userspace.opennebula.cloud import BASE, IMAGES, OTHER_SYSTEM, SYSTEM, CloudTestCase

pytestmark = pytest.mark.long

Action = Callable[[], Answer]

OURS = " virtman 600 virtman "
"""Begins what our scripts have a host do. OpenNebula's own, which move the VM's folder, cannot all be repeated."""


class FaultsTest(CloudTestCase):
    def sweep(
        self, act: Action, again: Action, check: Callable[[], None], back: Action, clear: Action = lambda: Answer(True)
    ) -> None:
        """Let each call of ssh of an action fail, and be cut off when all is done as it is repeated; repeat it then.

        ``back``: as it was before the action. ``clear``: what comes between a failure and the next try.
        """
        for number in itertools.count(1):
            failed = self._hit(Fate.FAIL, number, act)
            if failed is None:
                break
            if not failed.ok:
                self.ok(clear())
                cut = self._hit(Fate.CUT, number, again)
            if failed.ok or cut is None:  # what is repeated may have fewer calls
                self.ok(back())
                cut = self._hit(Fate.CUT, number, act)
                assert cut is not None
            if not cut.ok:
                self.ok(clear())
                self.ok(again())
            check()
            self.ok(back())
        self.assertGreater(number, 1, "no call was hit")
        check()
        self.ok(back())

    def _hit(self, fate: Fate, number: int, act: Action) -> Answer | None:
        """How an action went one of whose calls had this fate; None if it has not so many, and went well."""
        fault = self.frontend.exchange.plan(fate, matching=OURS, nth=number)
        answer = act()
        if not fault.happened.is_set():
            self.frontend.exchange.forget(fault)
            self.ok(answer)
            return None
        if not answer.ok:
            self.assertThat(answer.reason.splitlines(), HasLength(1))
            self.frontend.exchange.settle()
        return answer

    def assert_no_disk(self, host: str) -> None:
        self.assertEqual(set(), self.disks()[host])

    def retry(self, vm: Vm) -> Action:
        """What an operator does after a failure."""
        return partial(self.one.recover_retry, vm)

    def test_a_disk_is_made_and_removed(self) -> None:
        vm = self.vm(self.add_image(7, mib=2))
        deploy = partial(self.one.deploy, vm, "host-2", SYSTEM)

        def begin_again() -> Answer:
            answer = self.one.terminate(vm)
            vm.history.clear()
            return answer

        self.sweep(deploy, self.retry(vm), lambda: self.reads(vm, 0, BASE), begin_again)
        self.ok(deploy())
        self.sweep(lambda: self.one.terminate(vm), self.retry(vm), self.nothing_left, deploy)

    def test_a_disk_moves_between_hosts_and_to_the_front_end_and_back(self) -> None:
        vm = self.deployed()
        self.write(vm, 0, 2)

        def check(where: str) -> Callable[[], None]:
            def right() -> None:
                self.reads(vm, 0, 2)
                self.assertEqual({where}, {host for host, names in self.disks().items() if names})

            return right

        migrate, resume = partial(self.one.migrate, vm), partial(self.one.resume, vm)
        stop = partial(self.one.stop, vm)
        self.sweep(partial(migrate, "host-2"), self.retry(vm), check("host-2"), partial(migrate, "host-1"))
        gone = partial(self.assert_no_disk, "host-1")
        self.sweep(stop, self.retry(vm), gone, partial(resume, "host-1", SYSTEM))
        self.ok(stop())
        self.sweep(partial(resume, "host-2", SYSTEM), self.retry(vm), check("host-2"), stop)
        self.ok(resume("host-2", SYSTEM))
        self.one.power_off(vm)
        self.ok(self.one.snapshot_revert(vm, 0, 0))
        self.reads(vm, 0, 1)

    def test_a_persistent_disk_is_given_out_and_taken_back(self) -> None:
        image = self.add_image(7, mib=2, persistent=True)
        vm = self.vm(image)
        self.ok(self.one.deploy(vm, "host-2", SYSTEM))
        self.write(vm, 0, 1)
        written = [1]

        terminate, deploy = partial(self.one.terminate, vm), partial(self.one.deploy, vm, "host-2", SYSTEM)

        def change() -> Answer:
            answer = deploy()
            self.reads(vm, 0, written[0])
            written[0] += 1
            self.write(vm, 0, written[0])
            return answer

        self.sweep(terminate, self.retry(vm), partial(self.assert_no_disk, "host-2"), change)
        self.ok(terminate())
        self.sweep(deploy, self.retry(vm), lambda: self.reads(vm, 0, written[0]), terminate)

    def test_a_snapshot_is_taken_gone_back_to_and_deleted(self) -> None:
        vm = self.deployed()
        actions = (self.one.snapshot_create, self.one.snapshot_revert, self.one.snapshot_delete)
        take, revert, forget = (partial(act, vm, 0, 1) for act in actions)

        def overwrite() -> Answer:
            self.write(vm, 0, 2)
            return Answer(True)

        self.sweep(take, take, lambda: self.reads(vm, 0, 1), forget)
        self.ok(take())
        self.ok(overwrite())
        self.sweep(revert, revert, lambda: self.reads(vm, 0, 1), overwrite)
        self.sweep(forget, forget, lambda: self.reads(vm, 0, 2), take)

    def test_a_disk_is_saved(self) -> None:
        vm = self.vm(self.add_image(7, mib=2))
        self.ok(self.one.deploy(vm, "host-2", SYSTEM))
        self.write(vm, 0, 1)
        numbers = iter(range(10, 100))
        saved = list[Image]()

        def save() -> Answer:
            saved.append(Image(next(numbers), IMAGES))
            return self.one.save_as(vm, 0, saved[-1])

        def drop() -> Answer:
            image = saved.pop()
            return self.one.remove_image(image) if image.source else Answer(True)

        def check() -> None:
            other = self.vm(saved[-1], number=43)
            self.ok(self.one.deploy(other, "host-1", SYSTEM))
            self.reads(other, 0, 1)
            self.ok(self.one.terminate(other))

        self.sweep(save, save, check, drop, clear=drop)

    def deployed(self) -> Vm:
        """A VM that is off, on host-1, whose disk has a snapshot."""
        vm = self.vm(self.add_image(7, mib=2))
        self.ok(self.one.deploy(vm, "host-1", SYSTEM))
        self.one.power_off(vm)
        self.write(vm, 0, 1)
        self.ok(self.one.snapshot_create(vm, 0, 0))
        return vm

    def test_a_vm_that_is_deleted_while_its_disk_is_made_or_moves_leaves_nothing(self) -> None:
        plain, persistent = self.add_image(7, mib=2), self.add_image(8, mib=2, persistent=True)
        for fate, host, step, image in (
            (Fate.LATE, "host-1", "create", plain),
            (Fate.LATE, "host-1", "create", persistent),
            (Fate.LATE, "host-2", "receive", plain),  # the old host has begun, and the new one has not
            (Fate.STALL, "host-2", "receive", plain),
            (Fate.LATE, "host-1", "moved", plain),  # the new host has the disk
        ):
            vm = self.vm(image)
            act = partial(self.one.deploy, vm, "host-1", SYSTEM)
            if step != "create":
                self.ok(act())
                self.one.power_off(vm)
                self.write(vm, 0, 1)
                act = partial(self.one.migrate, vm, "host-2", SYSTEM)
            fault = self.frontend.exchange.plan(fate, host=host, matching=f"{OURS}{step}", after=1 << 16)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(act)
                fault.wait()
                try:
                    self.ok(self.one.recover_delete(vm))
                finally:
                    fault.release()
            self.frontend.exchange.settle()
            self.nothing_left()
            for end in ("host-1", "host-2"):
                self.assertFalse((self.frontend.datastores(end) / "0" / "42").exists())

    def test_a_vm_that_ran_goes_on_where_it_was_if_its_folder_does_not_move(self) -> None:
        self.system = "virtman"
        self.one.system_datastore(106, self.system)
        vm = self.vm(self.add_image(7, mib=2))
        self.ok(self.one.deploy(vm, "host-1", 106))
        self.write(vm, 0, 1)
        self.frontend.exchange.plan(Fate.FAIL, host="host-1", matching="tar -C")
        self.assertFalse(self.one.migrate(vm, "host-2").ok)
        self.one.recover_failure(vm)
        self.reads(vm, 0, 1)
        self.write(vm, 0, 2)

        def check() -> None:
            self.reads(vm, 0, 2)
            self.assertEqual([0, 0, 1], [len(self.disks()[host]) for host in ("origin", "host-1", "host-2")])

        self.sweep(
            lambda: self.one.migrate(vm, "host-2"), self.retry(vm), check, lambda: self.one.migrate(vm, "host-1")
        )
        self.ok(self.one.terminate(vm))
        self.nothing_left()

    def test_a_persistent_disk_leaves_no_stream_in_another_system_datastore(self) -> None:
        vm = self.vm(self.add_image(7, mib=2, persistent=True))
        self.ok(self.one.deploy(vm, "host-1", SYSTEM))
        self.ok(self.one.undeploy(vm))
        self.frontend.exchange.plan(Fate.CUT, host="host-2", matching=f"{OURS}receive")
        self.assertFalse(self.one.deploy(vm, "host-2", OTHER_SYSTEM).ok)
        self.frontend.exchange.settle()
        self.one.power_on(vm)  # onevm recover --success: the disk has arrived
        self.ok(self.one.terminate(vm))
        self.assertEqual([], list(self.frontend.datastores().glob("*/.virtman/*")))

    def test_two_calls_for_one_disk_at_once(self) -> None:
        vm = self.vm(self.add_image(7))
        with ThreadPoolExecutor(4) as pool:
            for answer in [pool.submit(self.one.deploy, vm, "host-1", SYSTEM) for _ in range(4)]:
                self.ok(answer.result())
        self.reads(vm, 0, BASE)
        self.assertThat(self.disks()["host-1"], HasLength(1))

    def test_an_image_that_cannot_be_added_leaves_nothing(self) -> None:
        file = self.folder / "disk.vmdk"
        file.write_bytes(b"KDMV" + bytes(1 << 20))
        self.refused(self.one.add_image(Image(7, IMAGES, str(file))), "VMDK")
        self.refused(self.one.add_image(Image(8, IMAGES, "/etc/passwd")), "RESTRICTED_DIRS")
        self.refused(self.one.add_image(Image(9, IMAGES, str(self.folder / "nothing"))), "nothing")
        self.frontend.exchange.down("host-1")
        file.write_bytes(bytes(1 << 20))
        self.refused(self.one.add_image(Image(10, IMAGES, str(file))), "host-1: ")
        self.frontend.exchange.up("host-1")
        wait_until(lambda: not self.cluster.agents[0].images(), "what was published at the other origin goes")
        self.assertEqual([], list(self.store.base.iterdir()))

    def test_awkward_names_and_paths_do_no_harm(self) -> None:
        file = self.folder / "a 'quoted' \"näme\"; $(reboot)\n`x`.raw"
        file.write_bytes(bytes([BASE]) * (2 << 20))
        image = Image(
            7, IMAGES, str(file), name="ein Bild\nmit 'Namen' & <mehr>", attributes={"DESCRIPTION": "a\n$(b)"}
        )
        self.ok(self.one.add_image(image))
        vm = self.vm(image)
        vm.name, vm.user["NOTE"] = 'VM\'s "name"\nünd', "$(reboot) `x`"
        self.ok(self.one.deploy(vm, "host-1", SYSTEM))
        self.reads(vm, 0, BASE)
