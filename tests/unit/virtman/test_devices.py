"""Devices of others that are read through the cache, over a double of the driver."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from testtools import TestCase
from testtools.matchers import Contains

from drivers.base import DeviceState, VolumeState
from drivers.errors import DriverError
from tests.doubles.drivers import DEVICE_SIZE, POOL
from tests.unit.virtman.scene import Scene
from virtman.devices import LEAVING, LOST, Devices
from virtman.errors import BadDevice, DiskBusy, NoRoom, NoVolumes, StateNewer
from virtman.passing import Passed
from virtman.records import DETACH_DEVICE, DeviceRecord, State

TROUBLE = DriverError("the device is on fire")


class DevicesTest(TestCase):
    """Files that say a number stand for devices."""

    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(self)
        self.host = self.scene.host
        self.device = self.new_device("disk", "8:16")

    def new_device(self, name: str, number: str) -> Path:
        path = self.scene.folder / name
        path.write_text(number)
        return path

    @property
    def devices(self) -> Devices:
        return self.scene.devices

    def attach(self) -> DeviceRecord:
        return self.devices.attach(self.device)

    def states(self) -> list[str]:
        return [state for _record, state, _device in self.devices.listed()]

    def another_boot(self) -> None:
        """The host is started anew: nothing of an attachment is left."""
        for record in self.devices.records():
            self.scene.device_shelf.put(record.name, record.model_copy(update={"boot": "before"}))
        self.host.devices.clear()
        self.scene.restart()

    def test_attaching_twice_is_attaching_once_whatever_it_is_called(self) -> None:
        record = self.attach()
        self.assertEqual((str(self.device), "8:16", DEVICE_SIZE), (record.device, record.number, record.size))
        link = self.scene.folder / "link"
        link.symlink_to(self.device)
        self.assertEqual(record, self.devices.attach(link))
        self.assertEqual([record.name], list(self.host.devices))
        self.assertEqual(record.path, str(self.host.devices[record.name].path))

    def test_what_was_opened_is_attached_wherever_its_path_leads_by_then(self) -> None:
        link, other = self.scene.folder / "link", self.new_device("other", "8:32")
        link.symlink_to(self.device)
        fd = os.open(link, os.O_RDWR)
        self.addCleanup(os.close, fd)

        def lead_elsewhere(step: str) -> None:
            if step == "before cache.attach_device":
                link.unlink()
                link.symlink_to(other)

        self.host.moment = lead_elsewhere
        record = self.devices.attach(link, Passed(fd, link, trusted=False))
        self.assertEqual("8:16", self.host.devices[record.name].number)

    def test_each_attachment_has_a_name_of_its_own(self) -> None:
        first = self.attach()
        self.devices.detach(self.device)
        other = self.devices.attach(self.new_device("other", "8:32"))
        self.assertEqual(3, len({first.name, other.name, self.attach().name}))

    def test_one_that_has_grown_gets_its_size(self) -> None:
        self.attach()
        self.host.sizes["8:16"] = 2 * DEVICE_SIZE
        self.attach()
        self.assertEqual([2 * DEVICE_SIZE], [device.size for device in self.host.devices.values()])

    def test_what_is_no_device_is_refused(self) -> None:
        for path in (self.scene.folder, self.scene.folder / "none", self.new_device("file", "text")):
            said = str(self.assertRaises(BadDevice, self.devices.attach, path))
            self.assertThat(said, Contains(f"{path} is not read through the cache: there is no such block device"))
        self.assertEqual(([], []), (self.devices.records(), self.host.calls))

    def test_what_the_driver_refuses_leaves_nothing(self) -> None:
        self.host.refused["8:16"] = "it is mounted"
        error = self.assertRaises(BadDevice, self.attach)
        self.assertEqual(f"{self.device} is not read through the cache: it is mounted", str(error))
        self.scene.check(self)
        self.assertEqual([], self.devices.records())

    def test_a_record_that_cannot_be_written_leaves_nothing(self) -> None:
        for after in range(2):
            self.scene.fill_up(after)
            self.assertRaises(NoRoom, self.attach)
            self.scene.make_room()
            self.assertEqual({}, self.scene.host.leftovers())
            self.assertEqual([], self.devices.records())

    def test_what_cannot_be_undone_is_undone_later(self) -> None:
        self.host.failing = {"cache.attach_device": TROUBLE, "cache.detach_device": TROUBLE}
        self.assertIs(TROUBLE, self.assertRaises(DriverError, self.attach))
        self.assertEqual(["attaching"], self.states())
        self.host.failing = {}
        self.assertTrue(self.devices.repair_if_free(self.devices.records()[0].name))
        self.assertEqual([], self.devices.records())

    def test_it_goes_by_each_of_its_paths(self) -> None:
        link = self.scene.folder / "link"
        link.symlink_to(self.device)
        for path_of in (lambda record: record.device, lambda _record: link, lambda record: record.path):
            self.devices.detach(Path(path_of(self.attach())))
            self.assertEqual(({}, []), (self.host.devices, self.devices.records()))

    def test_it_goes_by_another_name_of_what_was_handed_out(self) -> None:
        record = self.attach()
        handed_out, other_name = self.new_device("map", "253:1"), self.new_device("dm-1", "253:1")
        self.scene.device_shelf.put(record.name, record.model_copy(update={"path": str(handed_out)}))
        self.devices.detach(other_name)
        self.assertEqual({}, self.host.devices)

    def test_detaching_what_is_not_attached_is_fine(self) -> None:
        for path in (self.device, Path("/nonexistent"), Path("/dev/mapper/virtman-volume-none")):
            self.devices.detach(path)
        self.attach()
        self.devices.detach(self.new_device("other", "8:32"))
        self.assertEqual(["cached"], self.states())

    def test_the_path_of_one_that_has_vanished_means_it(self) -> None:
        self.attach()
        self.device.unlink()
        self.devices.detach(self.device)
        self.assertEqual({}, self.host.devices)

    def test_a_path_that_leads_to_another_device_now_means_that(self) -> None:
        self.attach()
        self.device.write_text("8:32")
        other = self.attach()
        self.devices.detach(self.device)
        self.assertNotIn(other.name, self.host.devices)
        self.assertEqual(1, len(self.host.devices))

    def test_one_in_use_stays_as_it_is(self) -> None:
        record = self.attach()
        self.host.open_devices.add(record.name)
        error = self.assertRaises(DiskBusy, self.devices.detach, self.device)
        self.assertThat(str(error), Contains(f"{self.device} is in use"))
        self.assertEqual([record], self.devices.records())
        self.assertEqual(set(), self.host.cut_off)

    def test_one_in_use_goes_by_force(self) -> None:
        record = self.attach()
        self.host.open_devices.add(record.name)
        self.devices.detach(self.device, force=True)
        self.assertEqual(({record.name}, {}, []), (self.host.cut_off, self.host.devices, self.devices.records()))

    def test_one_whose_storage_is_silent_is_let_go_later(self) -> None:
        record = self.attach()
        self.host.open_devices.add(record.name)
        self.host.silent = True
        self.assertRaises(DriverError, self.devices.detach, self.device, force=True)
        self.assertEqual([LEAVING], self.states())
        self.devices.tend(record.name)
        self.assertNotIn("cache.tend_device", self.host.calls)
        self.assertRaises(DriverError, self.devices.attach, self.device)
        self.scene.start()
        self.host.silent = False
        self.scene.restart()
        self.assertEqual(({}, []), (self.host.devices, self.devices.records()))

    def test_one_that_is_being_let_go_by_force_goes_so_whoever_asks_again(self) -> None:
        record = self.attach()
        self.host.open_devices.add(record.name)
        self.host.silent = True
        self.assertRaises(DriverError, self.devices.detach, self.device, force=True)
        self.host.silent = False
        self.devices.detach(self.device)
        self.assertEqual({}, self.host.devices)

    def test_without_room_it_is_let_go_all_the_same(self) -> None:
        self.attach()
        self.scene.fill_up()
        self.devices.detach(self.device)
        self.assertEqual(({}, []), (self.host.devices, self.devices.records()))

    def test_one_that_cannot_be_let_go_is_not_attached_again_as_it_is(self) -> None:
        first = self.attach()
        self.host.failing = {"cache.detach_device": TROUBLE}
        self.assertRaises(DriverError, self.devices.detach, self.device)
        self.assertRaises(DriverError, self.attach)
        self.host.failing = {}
        self.assertNotEqual(first.name, self.attach().name)

    def test_after_a_reboot_it_is_told_and_not_attached(self) -> None:
        before = self.attach()
        self.another_boot()
        self.assertEqual([LOST], self.states())
        self.devices.tend(before.name)
        self.assertEqual({}, self.host.devices)
        after = self.attach()
        self.assertNotEqual(before.name, after.name)
        self.assertEqual([after], self.devices.records())

    def test_after_a_reboot_it_is_forgotten_by_either_path(self) -> None:
        for called in ("device", "path"):
            record = self.attach()
            self.another_boot()
            self.devices.detach(Path(getattr(record, called)))
            self.assertEqual([], self.devices.records())

    def test_one_that_somebody_has_taken_away_is_told(self) -> None:
        self.attach()
        self.host.devices.clear()
        self.assertEqual([LOST], self.states())

    def test_what_a_later_release_began_before_a_reboot_stays_and_its_path_means_what_is_attached_now(self) -> None:
        before = self.attach()
        self.scene.device_shelf.put(before.name, before.begin("teleport"))
        self.another_boot()
        self.attach()
        self.device.unlink()
        self.devices.detach(self.device)
        self.assertEqual(([before.name], {}), ([record.name for record in self.devices.records()], self.host.devices))

    def test_a_number_of_before_a_reboot_means_nothing(self) -> None:
        self.attach()
        self.another_boot()
        other = self.new_device("other", "8:16")
        self.devices.detach(other)
        self.assertEqual([LOST], self.states())
        self.devices.attach(other)
        self.assertEqual([LOST, "cached"], sorted(self.states(), reverse=True))

    def test_a_volume_that_comes_takes_it(self) -> None:
        self.host.volumes[POOL.path] = replace(POOL, state=VolumeState.FAILED)
        record = self.attach()
        self.assertEqual([DeviceState.DIRECT], self.states())
        self.devices.tend(record.name)
        self.assertEqual([DeviceState.DIRECT], self.states())
        self.host.volumes[POOL.path] = POOL
        self.devices.tend(record.name)
        self.assertEqual([DeviceState.CACHED], self.states())

    def test_nobody_tends_it_while_a_call_is_under_way(self) -> None:
        record = self.attach()
        with self.devices.locks.hold(record.number):
            self.devices.tend(record.name)
            self.assertFalse(self.devices.repair_if_free(record.name))
        self.assertNotIn("cache.tend_device", self.host.calls)

    def test_what_has_no_record_is_removed_unless_it_is_open(self) -> None:
        stray = self.attach().name
        self.scene.device_shelf.remove(stray)
        self.assertEqual({stray}, self.devices.strays())
        self.host.open_devices.add(stray)
        self.assertRaises(DriverError, self.devices.remove_stray, stray)
        self.host.open_devices.clear()
        self.scene.restart()
        self.assertEqual({}, self.host.devices)

    def test_what_has_a_record_by_now_is_no_stray(self) -> None:
        record = self.attach()
        self.devices.remove_stray(record.name)
        self.assertEqual([record.name], list(self.host.devices))

    def test_an_operation_that_is_not_known_is_left_alone(self) -> None:
        record = self.attach()
        self.scene.device_shelf.put(record.name, record.begin("teleport"))
        self.scene.restart()
        self.assertEqual([record.name], list(self.devices.troubles()))
        for call in (self.attach, lambda: self.devices.detach(self.device)):
            self.assertRaises(StateNewer, call)
        self.assertIn(record.name, self.host.devices)

    def test_without_a_driver_it_is_said_who_could(self) -> None:
        devices = Devices(self.scene.device_shelf, None, "bcache has them")
        for call in (devices.attach, devices.detach):
            self.assertEqual("bcache has them", str(self.assertRaises(NoVolumes, call, self.device)))
        self.assertEqual(([], frozenset()), (devices.listed(), devices.strays()))

    def test_a_detach_that_was_cut_off_is_given_up_if_somebody_has_it_open_by_then(self) -> None:
        record = self.attach()
        self.scene.device_shelf.put(record.name, record.begin(DETACH_DEVICE, force=False))
        self.host.open_devices.add(record.name)
        self.scene.restart()
        self.assertEqual([(State.PRESENT, True)], [(r.state, r.steady) for r in self.devices.records()])
