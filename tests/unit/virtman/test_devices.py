"""Devices of others that are read through the cache, over a double of the driver."""

from __future__ import annotations

import os
from pathlib import Path

from testtools import TestCase
from testtools.matchers import Contains

from drivers.errors import DriverError, NotReleased
from tests.doubles.drivers import DEVICE_SIZE
from tests.unit.virtman.scene import Scene
from virtman.devices import LEAVING, LOST, Devices
from virtman.errors import BadDevice, DiskBusy
from virtman.fdpassing import Passed
from virtman.records import DETACH_DEVICE, DeviceRecord, State


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
        return [device.state for device in self.devices.listed().values()]

    def another_boot(self) -> None:
        """The host is started anew: nothing of an attachment is left."""
        for record in self.devices.records.all():
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
        self.assertEqual(record.path, self.host.devices[record.name].path)

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
        self.assertEqual("8:16", self.host.numbers[record.name])

    def test_one_that_has_grown_gets_its_size(self) -> None:
        self.attach()
        self.host.sizes["8:16"] = 2 * DEVICE_SIZE
        self.attach()
        self.assertEqual([2 * DEVICE_SIZE], [device.size for device in self.host.devices.values()])

    def test_what_the_driver_refuses_leaves_nothing(self) -> None:
        self.host.refused["8:16"] = "it is mounted"
        error = self.assertRaises(BadDevice, self.attach)
        self.assertEqual(f"{self.device} is not read through the cache: it is mounted", str(error))
        self.scene.check(self)
        self.assertEqual([], self.devices.records.all())

    def test_it_goes_by_each_of_its_paths(self) -> None:
        link = self.scene.folder / "link"
        link.symlink_to(self.device)
        for path_of in (lambda record: record.device, lambda _record: link, lambda record: record.path):
            self.devices.detach(Path(path_of(self.attach())))
            self.assertEqual(({}, []), (self.host.devices, self.devices.records.all()))

    def test_detaching_what_is_not_attached_is_fine(self) -> None:
        for path in (self.device, Path("/nonexistent"), Path("/dev/mapper/virtman-volume-none")):
            self.devices.detach(path)
        self.attach()
        self.devices.detach(self.new_device("other", "8:32"))
        self.assertEqual(["cached"], self.states())

    def test_one_in_use_stays_as_it_is(self) -> None:
        record = self.attach()
        self.host.open_devices.add(record.name)
        error = self.assertRaises(DiskBusy, self.devices.detach, self.device)
        self.assertThat(str(error), Contains(f"{self.device} is in use"))
        self.assertEqual([record], self.devices.records.all())
        self.assertEqual(set(), self.host.cut_off)

    def test_one_whose_storage_does_not_end_its_requests_is_told_as_leaving_until_it_does(self) -> None:
        self.attach()
        self.host.failing["cache.detach_device"] = NotReleased("requests", 10)
        self.assertRaises(DriverError, self.devices.detach, self.device, force=True)
        self.assertEqual([LEAVING], self.states())
        self.host.failing.clear()
        self.devices.tend(self.devices.records.all()[0].name)
        self.assertEqual(({}, []), (self.host.devices, self.devices.records.all()))

    def test_after_a_reboot_it_is_told_and_not_attached(self) -> None:
        before = self.attach()
        self.another_boot()
        self.assertEqual([LOST], self.states())
        self.devices.tend(before.name)
        self.assertEqual({}, self.host.devices)
        after = self.attach()
        self.assertNotEqual(before.name, after.name)
        self.assertEqual([after], self.devices.records.all())

    def test_nobody_tends_it_while_a_call_is_under_way(self) -> None:
        record = self.attach()
        with self.devices.locks.hold(record.number):
            self.devices.tend(record.name)
        self.assertNotIn("cache.tend_device", self.host.calls)

    def test_what_has_no_record_is_removed_unless_it_is_open(self) -> None:
        orphan = self.attach().name
        self.scene.device_shelf.remove(orphan)
        self.assertEqual({orphan}, self.devices.orphans())
        self.host.open_devices.add(orphan)
        self.assertRaises(DriverError, self.devices.remove_orphan, orphan)
        self.host.open_devices.clear()
        self.scene.restart()
        self.assertEqual({}, self.host.devices)

    def test_a_detach_that_was_cut_off_is_given_up_if_somebody_has_it_open_by_then(self) -> None:
        record = self.attach()
        self.scene.device_shelf.put(record.name, record.begin(DETACH_DEVICE, force=False))
        self.host.open_devices.add(record.name)
        self.scene.restart()
        self.assertEqual([(State.PRESENT, True)], [(r.state, r.steady) for r in self.devices.records.all()])
