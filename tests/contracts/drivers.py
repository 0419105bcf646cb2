"""What every driver has to do, whatever it is made of: the contract of drivers/base.py.

Each class here is the body of a test case that brings a driver and what it works on, on the abstract methods and
attributes named first. ``make`` gives a new driver object over the same host, as a new agent has it.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from testtools import TestCase

from drivers.base import (
    AttachDriver,
    CacheDriver,
    Child,
    Device,
    DeviceCache,
    ExportDriver,
    Image,
    ImageSource,
    Opened,
    Parent,
    PathState,
    Range,
    Taken,
    VmDiskDriver,
)
from drivers.blocks import open_blocks
from drivers.errors import (
    BadDevice,
    BadDisk,
    BadName,
    DeviceInUse,
    DeviceRefused,
    DiskInUse,
    DriverError,
    InUse,
    NoParents,
    NotAttached,
    SnapshotMissing,
    VmDiskMissing,
)

BAD_NAMES = ("", "a/b", "..", "a.b", "-a", "x" * 64)
SECRET = "5e" * 32
SERVING_KEY = "7e" * 32
NOWHERE = Device(1 << 20)
"""What no driver can build on: neither a kernel device nor a QEMU block node."""


def path_of(device: Device) -> Path:
    """Where a device is that has a path: a kernel device, or a file."""
    assert device.path is not None
    return device.path


class AttachContract(TestCase):
    """``parents``: two hosts that serve ``image``, both of them alive. ``file``: holds the whole image."""

    image: Image
    file: Path
    parents: list[Parent]

    def make(self) -> AttachDriver:
        raise NotImplementedError

    def assert_nothing_left(self, driver: AttachDriver) -> None:
        self.assertEqual(frozenset(), driver.existing())
        self.assertRaises(NotAttached, driver.paths, self.image.name)

    def assert_follows(self, driver: AttachDriver, parents: list[Parent]) -> None:
        paths = driver.paths(self.image.name)
        self.assertEqual(parents, [path.parent for path in paths])
        self.assertLessEqual({path.state for path in paths}, set(PathState))

    def test_asking_twice_is_asking_once(self) -> None:
        driver = self.make()
        self.assertFalse(driver.unsettled(self.image.name))
        first = driver.connect(self.image, self.parents)
        self.assertEqual(self.image.size, first.size)
        self.assertFalse(driver.update(self.image, self.parents))
        self.assertEqual(first, driver.connect(self.image, self.parents))
        self.assertEqual({self.image.name}, driver.existing())
        self.assert_follows(driver, self.parents)
        self.assertFalse(driver.unsettled(self.image.name))

    def test_paths_follow_a_new_list(self) -> None:
        driver = self.make()
        driver.connect(self.image, self.parents)
        for follow in (driver.update, driver.connect):
            for parents in (self.parents[::-1], self.parents[:1], self.parents):
                follow(self.image, parents)
                self.assert_follows(driver, parents)

    def test_what_cannot_be_followed_is_refused_and_changes_nothing(self) -> None:
        driver = self.make()
        self.assertRaises(NoParents, driver.connect, self.image, [])
        self.assertRaises(NotAttached, driver.update, self.image, self.parents)
        self.assert_nothing_left(driver)
        driver.connect(self.image, self.parents)
        self.assertRaises(NoParents, driver.update, self.image, [])
        self.assert_follows(driver, self.parents)

    def test_disconnecting_leaves_nothing_and_can_be_repeated(self) -> None:
        driver = self.make()
        driver.disconnect(self.image.name)
        for abandoned in (False, True):
            driver.connect(self.image, self.parents)
            if abandoned:
                driver.abandon(self.image.name)
            for _ in range(2):
                driver.disconnect(self.image.name)
                self.assert_nothing_left(driver)

    def test_connecting_undoes_abandoning(self) -> None:
        driver = self.make()
        driver.abandon(self.image.name)
        driver.connect(self.image, self.parents)
        driver.abandon(self.image.name)
        driver.abandon(self.image.name)
        driver.connect(self.image, self.parents)
        self.assert_follows(driver, self.parents)

    def test_a_new_driver_finds_a_route_and_goes_on_with_it_or_removes_it(self) -> None:
        self.make().connect(self.image, self.parents)
        driver = self.make()
        self.assertEqual({self.image.name}, driver.existing())
        self.assertRaises(NotAttached, driver.paths, self.image.name)
        driver.connect(self.image, self.parents)
        self.assert_follows(driver, self.parents)
        driver = self.make()
        driver.disconnect(self.image.name)
        self.assert_nothing_left(driver)

    def test_origin_is_a_whole_file_or_what_is_open_wherever_its_path_leads(self) -> None:
        driver, other = self.make(), replace(self.image, size=self.image.size + 512)
        with self.file.open("rb") as file:
            for content in (self.file, Opened(file.fileno(), "1f")):
                device = driver.origin(self.image, content)
                self.assertEqual(self.image.size, device.size)
                self.assertEqual(device, driver.origin(self.image, content))
                self.assertRaises(BadDisk, driver.origin, other, content)
        self.assertRaises(BadDisk, driver.origin, self.image, self.file.parent / "nothing")

    def test_bad_names_are_refused(self) -> None:
        driver = self.make()
        for name in BAD_NAMES:
            self.assertRaises(BadName, driver.connect, replace(self.image, name=name), self.parents)
            self.assertRaises(BadName, driver.disconnect, name)
        self.assert_nothing_left(driver)


class CacheContract(TestCase):
    """``base``: a device with the content of ``image``."""

    image: Image
    base: Device

    def make(self) -> CacheDriver:
        raise NotImplementedError

    def use(self, device: Device) -> None:
        """Serve the cache's device, and have everything of it read."""
        raise NotImplementedError

    def release(self) -> None:
        """Serve it no more."""
        raise NotImplementedError

    @property
    def absent(self) -> Image:
        """An image that never was here."""
        return replace(self.image, digest="sha256:" + "0" * 64)

    def test_opening_twice_is_opening_once_also_under_who_uses_it(self) -> None:
        driver = self.make()
        device = driver.open(self.image, self.base)
        self.assertEqual(self.image.size, device.size)
        self.assertEqual(device, driver.open(self.image, self.base))
        self.assertEqual({self.image.key}, driver.existing())
        self.use(device)
        self.assertEqual(device, self.make().open(self.image, self.base))
        self.assertRaises(InUse, driver.remove, self.image.key)
        self.assertEqual(self.image.size, driver.stats(self.image).held_bytes)

    def test_what_was_read_is_held_and_stays_when_it_is_closed(self) -> None:
        driver = self.make()
        driver.close(self.image)
        self.use(driver.open(self.image, self.base))
        self.assertEqual(self.image.size, driver.stats(self.image).held_bytes)
        self.release()
        for closing in (self.make(), driver):
            closing.close(self.image)
        self.assertEqual({self.image.key}, self.make().existing())
        driver = self.make()
        self.use(driver.open(self.image, self.base))
        self.assertEqual(self.image.size, driver.stats(self.image).held_bytes)

    def test_removing_leaves_nothing_and_can_be_repeated(self) -> None:
        driver = self.make()
        self.assertEqual((0, 0), (driver.remove(self.absent.key), driver.stats(self.absent).held_bytes))
        self.use(driver.open(self.image, self.base))
        self.release()
        driver.close(self.image)
        taken = driver.size(self.image.key)
        self.assertGreater(taken, 0)
        self.assertEqual(taken, driver.remove(self.image.key))
        self.assertEqual((0, 0), (driver.remove(self.image.key), driver.size(self.image.key)))
        self.assertEqual(frozenset(), driver.existing())
        self.assertEqual(0, driver.stats(self.image).held_bytes)

    def test_bad_input_is_refused_and_nothing_is_made(self) -> None:
        driver = self.make()
        self.assertRaises(BadDevice, driver.open, self.image, NOWHERE)
        self.assertRaises(BadName, driver.open, replace(self.image, digest="sha256:../../x"), self.base)
        self.assertRaises(BadName, driver.remove, "../x")
        self.assertRaises(BadName, driver.size, "../x")
        self.assertRaises(BadDisk, driver.open, replace(self.image, size=1000), replace(self.base, size=1000))
        self.assertEqual(frozenset(), driver.existing())


class DeviceCacheContract(TestCase):
    """``device`` and ``other``: block devices that nobody uses; ``used``: one that somebody does."""

    device: Path
    other: Path
    used: Path

    def make(self) -> DeviceCache:
        raise NotImplementedError

    def resize(self, size: int) -> None:
        """Let ``device`` have another size."""
        raise NotImplementedError

    def hold(self, path: Path) -> AbstractContextManager[object]:
        """Within it somebody has open what was handed out for a device."""
        raise NotImplementedError

    def assert_nothing_left(self, driver: DeviceCache) -> None:
        self.assertEqual(([], frozenset()), (driver.devices(), driver.existing_devices()))

    def test_attaching_twice_is_attaching_once(self) -> None:
        driver = self.make()
        first = driver.attach_device("one", self.device)
        self.assertEqual(first, driver.attach_device("one", self.device))
        (found,) = driver.devices()
        self.assertEqual(("one", first.path, first.size), (found.device, Path(found.path), found.size))
        self.assertEqual({"one"}, driver.existing_devices())

    def test_a_new_driver_finds_what_the_old_one_attached(self) -> None:
        first = self.make().attach_device("one", self.device)
        driver = self.make()
        self.assertEqual([first.path], [Path(found.path) for found in driver.devices()])
        self.assertEqual(first, driver.attach_device("one", self.device))
        driver.tend_device("one")
        driver.detach_device("one")
        self.assert_nothing_left(driver)

    def test_detaching_leaves_nothing_and_can_be_repeated(self) -> None:
        driver = self.make()
        driver.tend_device("one")
        self.assert_nothing_left(driver)
        driver.attach_device("one", self.device)
        for force in (False, False, True):
            driver.detach_device("one", force=force)
            self.assert_nothing_left(driver)

    def test_one_in_use_is_detached_by_force_alone(self) -> None:
        driver = self.make()
        path = driver.attach_device("one", self.device).path
        assert path is not None
        with self.hold(path):
            self.assertRaises(DeviceInUse, driver.detach_device, "one")
            self.assertEqual([path], [Path(found.path) for found in driver.devices()])
            driver.detach_device("one", force=True)
            self.assert_nothing_left(driver)
        driver.attach_device("two", self.device)

    def test_one_that_has_grown_gets_its_size_also_while_it_is_in_use_and_one_that_has_shrunk_stays(self) -> None:
        driver = self.make()
        first = driver.attach_device("one", self.device)
        assert first.path is not None
        self.resize(2 * first.size)
        with self.hold(first.path):
            self.assertEqual(replace(first, size=2 * first.size), driver.attach_device("one", self.device))
        self.resize(first.size)
        self.assertRaises(DeviceRefused, driver.attach_device, "one", self.device)
        self.assertEqual([2 * first.size], [found.size for found in driver.devices()])

    def test_another_device_does_not_get_the_name(self) -> None:
        driver = self.make()
        driver.attach_device("one", self.device)
        self.assertRaises(BadDevice, driver.attach_device, "one", self.other)
        driver.attach_device("two", self.other)
        self.assertEqual(["one", "two"], [found.device for found in driver.devices()])

    def test_what_cannot_be_attached_is_refused_and_nothing_is_made(self) -> None:
        driver = self.make()
        for device in (self.used, Path("/nonexistent"), Path("/dev/null")):
            self.assertRaises(DeviceRefused, driver.attach_device, "one", device)
        for name in BAD_NAMES:
            self.assertRaises(BadName, driver.attach_device, name, self.device)
            self.assertRaises(BadName, driver.detach_device, name)
            self.assertRaises(BadName, driver.tend_device, name)
        self.assert_nothing_left(driver)


class ExportContract(TestCase):
    """``device``: has the content of ``image``, and ``other`` has it, too."""

    image: Image
    device: Device
    other: Device

    def make(self) -> ExportDriver:
        raise NotImplementedError

    def assert_nothing_left(self, driver: ExportDriver) -> None:
        self.assertFalse(driver.serving(self.image.name))
        self.assertEqual(frozenset(), driver.existing())

    def assert_served(self, driver: ExportDriver) -> None:
        self.assertTrue(driver.serving(self.image.name))
        self.assertEqual({self.image.name}, driver.existing())

    def test_an_image_is_reserved_and_published_as_often_as_is_asked_for(self) -> None:
        driver = self.make()
        for _ in range(2):
            driver.reserve(self.image.name)
            self.assertFalse(driver.serving(self.image.name))
            self.assertEqual({self.image.name}, driver.existing())
        for device, replacing in ((self.device, False), (self.device, False), (self.device, True), (self.other, False)):
            driver.publish(self.image, device, replace=replacing)
            self.assert_served(driver)
            driver.reserve(self.image.name)
            self.assert_served(driver)

    def test_own_disks_are_made_on_the_same_data_whatever_is_below(self) -> None:
        driver = self.make()
        driver.publish(self.image, self.device)
        local = driver.local(self.image)
        self.assertEqual(self.image.size, local.size)
        driver.publish(self.image, self.other)
        self.assertEqual(local, self.make().local(self.image))

    def test_hits_are_of_what_is_served_where_they_are_counted(self) -> None:
        driver = self.make()
        self.assertIn(driver.hit_bytes(self.image.name), (0, None))
        driver.publish(self.image, self.device)
        hits = driver.hit_bytes(self.image.name)
        self.assertTrue(hits is None or hits >= 0, hits)
        driver.withdraw(self.image.name)
        self.assertIn(driver.hit_bytes(self.image.name), (0, None))

    def test_children_can_be_named_before_and_after_there_is_something_to_read(self) -> None:
        driver = self.make()
        driver.reserve(self.image.name)
        driver.allow(self.image.name, [Child("one", SECRET)])
        driver.publish(self.image, self.device)
        for children in ([Child("one", SECRET), Child("two", SECRET)], [Child("two", SECRET)], []):
            driver.allow(self.image.name, children)
            self.assert_served(driver)

    def test_withdrawing_leaves_nothing_and_can_be_repeated(self) -> None:
        driver = self.make()
        driver.withdraw(self.image.name)
        for _ in range(2):
            driver.publish(self.image, self.device)
            driver.allow(self.image.name, [Child("one", SECRET)])
            for _ in range(2):
                driver.withdraw(self.image.name)
                self.assert_nothing_left(driver)
        driver.reserve(self.image.name)
        self.assertFalse(driver.serving(self.image.name))
        driver.withdraw(self.image.name)
        self.assert_nothing_left(driver)

    def test_new_driver_finds_what_is_served_and_withdraws_it(self) -> None:
        self.make().publish(self.image, self.device)
        driver = self.make()
        self.assert_served(driver)
        driver.publish(self.image, self.device)
        self.assert_served(driver)
        driver = self.make()
        driver.withdraw(self.image.name)
        self.assert_nothing_left(driver)

    def test_bad_input_is_refused_and_nothing_is_made(self) -> None:
        driver = self.make()
        self.assertRaises(BadDevice, driver.publish, self.image, NOWHERE)
        for name in BAD_NAMES:
            self.assertRaises(BadName, driver.reserve, name)
            self.assertRaises(BadName, driver.publish, replace(self.image, name=name), self.device)
            self.assertRaises(BadName, driver.local, replace(self.image, name=name))
            self.assertRaises(BadName, driver.hit_bytes, name)
            self.assertRaises(BadName, driver.serving, name)
            self.assertRaises(BadName, driver.withdraw, name)
        self.assert_nothing_left(driver)


class SourceContract(TestCase):
    """``parents``: two hosts that serve ``image`` to this host. ``file``: holds the whole image."""

    image: Image
    file: Path
    parents: list[Parent]

    def make(self) -> ImageSource:
        raise NotImplementedError

    def source(self) -> ImageSource:
        """A source that serves the image."""
        source = self.make()
        source.reserve(self.image.name)
        source.admit(self.image.name, 1, [Child("one", SECRET)], serving_key=SERVING_KEY, new=True)
        source.ensure(self.image, self.parents)
        return source

    def assert_served(self, source: ImageSource) -> None:
        self.assertTrue(source.serving(self.image.name))
        self.assertEqual({self.image.name}, source.existing())

    def assert_nothing_left(self, source: ImageSource) -> None:
        self.assertFalse(source.serving(self.image.name))
        self.assertEqual(frozenset(), source.existing())
        self.assertEqual([], list(source.paths(self.image.name)))

    def test_an_image_is_reserved_and_served_as_often_as_is_asked_for(self) -> None:
        source = self.make()
        for _ in range(2):
            source.reserve(self.image.name)
            self.assertFalse(source.serving(self.image.name))
            self.assertEqual({self.image.name}, source.existing())
        for fresh in (False, False, True):
            source.ensure(self.image, self.parents, fresh=fresh)
            self.assert_served(source)
            source.reserve(self.image.name)
            self.assert_served(source)

    def test_the_paths_are_those_to_the_parents_in_their_order_and_follow_them(self) -> None:
        source = self.source()
        for parents in (self.parents, self.parents[::-1], self.parents[:1]):
            source.follow(self.image, parents, sure=True)
            self.assertEqual(parents, [path.parent for path in source.paths(self.image.name)])
            self.assert_served(source)

    def test_an_origin_serves_a_file_or_what_is_open_and_has_no_parents(self) -> None:
        source = self.make()
        source.ensure_origin(self.image, self.file)
        self.assert_served(source)
        self.assertEqual([], list(source.paths(self.image.name)))
        with self.file.open("rb") as file:
            for mark in ("one", "one", "two"):
                source.ensure_origin(self.image, Opened(file.fileno(), mark))
                self.assert_served(source)

    def test_an_origin_of_another_size_is_refused(self) -> None:
        source = self.make()
        self.assertRaises(BadDisk, source.ensure_origin, replace(self.image, size=2 * self.image.size), self.file)
        self.assertFalse(source.serving(self.image.name))

    def test_own_disks_are_made_on_the_same_data_whatever_is_below(self) -> None:
        source = self.source()
        device = source.device(self.image)
        self.assertEqual(self.image.size, device.size)
        source.follow(self.image, self.parents[1:], sure=False)
        self.assertEqual(device, self.make().device(self.image))

    def test_children_can_be_named_before_and_after_there_is_something_to_read(self) -> None:
        source = self.source()
        for revision, children in enumerate(([Child("two", SECRET)], []), 2):
            source.admit(self.image.name, revision, children, serving_key=SERVING_KEY)
            self.assert_served(source)
        source.close(self.image.name)
        source.admit(self.image.name, 1, [Child("one", SECRET)], serving_key=SERVING_KEY, new=True)
        self.assert_served(source)

    def test_dropping_leaves_what_was_kept_and_nothing_else_and_can_be_repeated(self) -> None:
        for _ in range(2):
            source = self.source()
            for content in (self.image, None):
                source.drop(self.image.name, content)
                self.assert_nothing_left(source)
        kept = source.kept()
        self.assertLessEqual(kept, {self.image.key})
        for _ in range(2):
            self.assertEqual(source.kept_size(self.image.key), source.forget(self.image.key))
        self.assertEqual(frozenset(), source.kept())

    def test_a_new_source_finds_what_is_served_and_drops_it(self) -> None:
        self.source()
        source = self.make()
        self.assert_served(source)
        source.ensure(self.image, self.parents)
        self.assert_served(source)
        source = self.make()
        source.drop(self.image.name, self.image)
        self.assert_nothing_left(source)

    def test_after_a_stop_a_new_source_begins_again(self) -> None:
        source = self.source()
        source.drop(self.image.name, self.image)
        source.stop()
        source = self.make()
        source.reserve(self.image.name)
        source.ensure(self.image, self.parents)
        self.assert_served(source)

    def test_bad_input_is_refused_and_nothing_is_made(self) -> None:
        source = self.make()
        self.assertRaises(NoParents, source.ensure, self.image, [])
        for name in BAD_NAMES:
            bad = replace(self.image, name=name)
            self.assertRaises(BadName, source.reserve, name)
            self.assertRaises(BadName, source.ensure, bad, self.parents)
            self.assertRaises(BadName, source.ensure_origin, bad, self.file)
            self.assertRaises(BadName, source.device, bad)
            self.assertRaises(BadName, source.serving, name)
            self.assertRaises(BadName, source.drop, name, None)
        self.assert_nothing_left(source)


class MovingContract(TestCase):
    """``origin`` serves ``image`` from ``file``; ``child`` reads from there, and keeps nothing yet.

    The image has a manifest. Some of its chunks hold nothing but zeros.
    """

    image: Image
    file: Path
    origin: ImageSource
    child: ImageSource

    def test_what_one_host_gives_another_can_keep(self) -> None:
        lacking = self.child.lacking(self.image)
        wanted = sum(each.length for each in lacking)
        self.assertTrue(0 < wanted < self.image.size)
        with tempfile.TemporaryFile() as moved:
            self.origin.get(self.image, lacking, moved.fileno())
            moved.seek(0)
            self.assertEqual(Taken(wanted), self.child.put(self.image, lacking, moved.fileno()))
        self.assertEqual([], list(self.child.lacking(self.image)))
        self.assertEqual(self.file.read_bytes(), self.got(self.child, [Range(0, self.image.size)]))

    def test_any_ranges_go_into_a_pipe_one_after_the_other_wherever_they_come_from(self) -> None:
        content = self.file.read_bytes()
        ranges = [Range(self.image.size - 1, 1), Range(5, 100_000), Range(5, 1)]
        expected = b"".join(content[each.offset :][: each.length] for each in ranges)
        for source in (self.child, self.origin):
            self.assertEqual(expected, self.got(source, ranges))

    def got(self, source: ImageSource, ranges: list[Range]) -> bytes:
        reader, writer = os.pipe()
        with ThreadPoolExecutor(1) as pool, os.fdopen(reader, "rb") as pipe:
            with os.fdopen(writer, "wb"):
                read = pool.submit(pipe.read)
                source.get(self.image, ranges, writer)
            return read.result()

    def test_a_file_is_written_from_where_it_is(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(b"before")
            file.flush()
            self.origin.get(self.image, [Range(0, self.image.size)], file.fileno())
            file.seek(0)
            self.assertEqual(b"before" + self.file.read_bytes(), file.read())

    def test_a_pipe_whose_reader_goes_away_is_an_error(self) -> None:
        reader, writer = os.pipe()
        with os.fdopen(writer, "wb"), ThreadPoolExecutor(1) as pool:
            with os.fdopen(reader, "rb", buffering=0) as pipe:
                get = pool.submit(self.child.get, self.image, [Range(0, self.image.size)], writer)
                pipe.read(1)
            self.assertRaises(DriverError, get.result)

    def test_ranges_that_are_empty_or_not_of_the_image_are_refused(self) -> None:
        with tempfile.TemporaryFile() as file:
            for bad in (Range(0, 0), Range(self.image.size, 1), Range(1, self.image.size)):
                self.assertRaises(DriverError, self.origin.get, self.image, [Range(0, 1), bad], file.fileno())
            self.assertEqual(0, file.seek(0, os.SEEK_END))


class VmDiskContract(TestCase):
    """``origin``: what this host's export gives VMs to read."""

    origin: Device

    def make(self) -> VmDiskDriver:
        raise NotImplementedError

    def test_creating_or_opening_a_disk_again_also_by_a_new_driver_gives_the_same_disk(self) -> None:
        driver = self.make()
        size = 2 * self.origin.size
        disk = driver.create("vm", self.origin, size)
        self.assertEqual(size, disk.size)
        for again in (driver, self.make()):
            self.assertEqual({"vm"}, again.existing())
            self.assertEqual([disk, disk], [again.open("vm") for _ in range(2)])
            self.assertEqual(disk, again.create("vm", self.origin, size))
            self.assertEqual(disk, again.create("vm", self.origin, self.origin.size))

    def test_each_vm_has_a_disk_of_its_own(self) -> None:
        driver = self.make()
        paths = {driver.create(name, self.origin, self.origin.size).path for name in ("one", "two")}
        self.assertEqual(2, len(paths - {None}))
        driver.delete("one")
        self.assertEqual({"two"}, driver.existing())
        self.assertRaises(VmDiskMissing, driver.open, "one")
        driver.open("two")

    def test_deleting_leaves_nothing_and_can_be_repeated(self) -> None:
        driver = self.make()
        driver.delete("vm")
        self.assertRaises(VmDiskMissing, driver.open, "vm")
        driver.create("vm", self.origin, self.origin.size)
        for _ in range(2):
            driver.delete("vm")
            self.assertEqual(frozenset(), driver.existing())
            self.assertRaises(VmDiskMissing, driver.open, "vm")
        self.assertEqual(2 * self.origin.size, driver.create("vm", self.origin, 2 * self.origin.size).size)
        driver.delete("vm")

    def test_there_is_room_to_spare_before_there_is_a_disk_and_with_one(self) -> None:
        driver = self.make()
        before = driver.spare()
        driver.create("vm", self.origin, self.origin.size)
        self.assertGreater(min(before, driver.spare()), 0)

    def test_bad_input_is_refused_and_nothing_is_made(self) -> None:
        driver, size = self.make(), self.origin.size
        self.assertRaises(BadDevice, driver.create, "vm", NOWHERE, size)
        for odd in (size - 512, size + 100, 0):
            self.assertRaises(BadDisk, driver.create, "vm", self.origin, odd)
        for name in BAD_NAMES:
            self.assertRaises(BadName, driver.create, name, self.origin, size)
            self.assertRaises(BadName, driver.open, name)
            self.assertRaises(BadName, driver.delete, name)
        self.assertEqual(frozenset(), driver.existing())


class SnapshotContract(TestCase):
    """Growing disks, and their snapshots. ``origin`` and ``make``: as of ``VmDiskContract``."""

    origin: Device
    all_orders = True
    """Whether what may happen in any order does so in all of them, or in three: each takes seconds in a guest."""

    def orders(self, names: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Orders of the names: the first is theirs, the last its reverse."""
        orders = list(itertools.permutations(names))
        return orders if self.all_orders else [orders[0], orders[2], orders[-1]]

    def make(self) -> VmDiskDriver:
        raise NotImplementedError

    def vm_disk(self) -> VmDiskDriver:
        """A driver with a disk ``vm`` as large as its image."""
        driver = self.make()
        driver.create("vm", self.origin, self.origin.size)
        return driver

    def write(self, device: Device, text: bytes) -> None:
        """Write to the beginning of a disk that nobody has open."""
        raise NotImplementedError

    def write_at(self, device: Device, offset: int, text: bytes) -> None:
        """Write to a sector of a disk that nobody has open."""
        with open_blocks("vm", device, write=True) as blocks:
            blocks.write(offset, text.ljust(512, b"\0"))

    def read(self, device: Device, length: int) -> bytes:
        """Read from the beginning of a disk that nobody has open."""
        raise NotImplementedError

    def discard(self, device: Device, length: int) -> None:
        """Discard the beginning of a disk that nobody has open, as the guest of a VM does that has the device."""
        raise NotImplementedError

    def wrote(self, driver: VmDiskDriver, text: bytes) -> None:
        self.write(driver.open("vm"), text)

    def assert_holds(self, driver: VmDiskDriver, text: bytes) -> None:
        self.assertEqual(text, self.read(driver.open("vm"), len(text)))

    def assert_others_are_told_of(self, driver: VmDiskDriver) -> None:
        """With somebody else at the disk ``vm``, who has a snapshot ``snapshot``, nothing that would disturb them is
        done."""
        self.assertRaises(DiskInUse, driver.revert, "vm", "snapshot")
        self.assertRaises(DiskInUse, driver.rename, "vm", "new")
        self.assertRaises(DiskInUse, driver.changes, "vm", None, None)
        self.assertEqual({"snapshot"}, driver.snapshots("vm"))

    def test_a_disk_grows_and_keeps_what_it_holds(self) -> None:
        driver = self.vm_disk()
        self.wrote(driver, b"kept")
        larger = 2 * self.origin.size
        for _ in range(2):
            self.assertEqual(larger, driver.resize("vm", larger, None).size)
        self.assertEqual(larger, self.make().open("vm").size)
        self.assert_holds(driver, b"kept")

    def test_a_disk_is_not_made_smaller_or_odd(self) -> None:
        driver, size = self.vm_disk(), self.origin.size
        for odd in (size - 512, size + 100, 0):
            self.assertRaises(BadDisk, driver.resize, "vm", odd, None)
        self.assertEqual(size, driver.open("vm").size)

    def test_a_snapshot_that_is_there_is_not_taken_again(self) -> None:
        driver = self.vm_disk()
        for text in (b"then", b"late"):
            self.wrote(driver, text)
            driver.take("vm", "snapshot", None)
        driver.revert("vm", "snapshot")
        self.assert_holds(driver, b"then")
        self.assertEqual({"snapshot"}, self.make().snapshots("vm"))

    def test_snapshots_outlive_reverting_and_each_other(self) -> None:
        driver = self.vm_disk()
        for name in ("one", "two"):
            self.wrote(driver, name.encode())
            driver.take("vm", name, None)
        driver.revert("vm", "one")
        self.wrote(driver, b"tri")
        driver.take("vm", "tri", None)
        left = ["two", "one", "tri"]
        for gone in ("one", "tri", "two"):
            for name in left:
                self.assertEqual(driver.revert("vm", name), driver.open("vm"))
                self.assert_holds(driver, name.encode())
            self.assertEqual(set(left), driver.snapshots("vm"))
            driver.drop("vm", gone, None)
            left.remove(gone)

    def test_snapshots_are_dropped_in_any_order(self) -> None:
        names = ("one", "two", "tri")
        for order in self.orders(names):
            driver = self.vm_disk()
            for name in names:
                self.wrote(driver, name.encode())
                driver.take("vm", name, None)
            self.wrote(driver, b"now")
            for number, name in enumerate(order):
                for _ in range(2):
                    driver.drop("vm", name, None)
                self.assertEqual(set(order[number + 1 :]), driver.snapshots("vm"))
                self.assert_holds(driver, b"now")
                self.assertRaises(SnapshotMissing, driver.revert, "vm", name)
            driver.delete("vm")

    def test_a_branch_outlives_the_snapshot_that_it_began_at(self) -> None:
        driver = self.vm_disk()
        self.wrote(driver, b"root")
        driver.take("vm", "root", None)
        for name in ("left", "rite"):
            driver.revert("vm", "root")
            self.wrote(driver, name.encode())
            driver.take("vm", name, None)
        driver.drop("vm", "root", None)
        for name in ("left", "rite", "left"):
            driver.revert("vm", name)
            self.assert_holds(driver, name.encode())
        driver.drop("vm", "left", None)
        driver.revert("vm", "rite")
        self.assert_holds(driver, b"rite")

    def test_clones_and_reverted_disks_are_as_large_as_the_disk_was(self) -> None:
        driver, larger = self.vm_disk(), 2 * self.origin.size
        driver.take("vm", "small", None)
        driver.resize("vm", larger, None)
        driver.take("vm", "large", None)
        for snapshot, size in (("small", self.origin.size), ("large", larger)):
            self.assertEqual(size, driver.revert("vm", snapshot).size)
            self.assertEqual(size, driver.clone("vm", snapshot, f"of-{snapshot}").size)

    def test_a_disk_is_deleted_with_its_snapshots(self) -> None:
        driver = self.vm_disk()
        for name in ("one", "two"):
            driver.take("vm", name, None)
        driver.delete("vm")
        self.assertEqual(frozenset(), driver.existing())
        driver.create("vm", self.origin, self.origin.size)
        self.assertEqual(frozenset(), driver.snapshots("vm"))

    def test_a_clone_is_a_disk_of_its_own(self) -> None:
        driver = self.vm_disk()
        self.wrote(driver, b"then")
        driver.take("vm", "snapshot", None)
        self.wrote(driver, b"late")
        clone = driver.clone("vm", "snapshot", "new")
        self.assertEqual(b"then", self.read(clone, 4))
        self.write(clone, b"mine")
        self.assertEqual(clone, self.make().clone("vm", "snapshot", "new"))
        self.assertEqual((b"mine", frozenset()), (self.read(clone, 4), driver.snapshots("new")))
        self.assert_holds(driver, b"late")
        driver.revert("vm", "snapshot")
        self.assert_holds(driver, b"then")
        self.assertEqual({"vm", "new"}, driver.existing())

    def test_clones_outlive_each_other_and_what_they_come_from(self) -> None:
        disks = ("vm", "new", "newer")
        for first, second, last in self.orders(disks):
            driver = self.vm_disk()
            self.wrote(driver, b"then")
            driver.take("vm", "snapshot", None)
            for new in disks[1:]:
                driver.clone("vm", "snapshot", new)
            driver.drop("vm", "snapshot", None)
            for vm in disks:
                self.write(driver.open(vm), vm.encode())
                driver.take(vm, "own", None)
            for gone, left in ((first, (second, last)), (second, (last,))):
                driver.delete(gone)
                for vm in left:
                    self.assertEqual(vm.encode(), self.read(driver.open(vm), len(vm)))
                    driver.drop(vm, "own", None)
                    self.assertEqual(vm.encode(), self.read(driver.open(vm), len(vm)))
            driver.delete(last)
            self.assertEqual(frozenset(), driver.existing())

    def test_a_clone_of_a_clone_has_snapshots_of_its_own(self) -> None:
        driver = self.vm_disk()
        for source, new in (("vm", "new"), ("new", "newer")):
            self.write(driver.open(source), source.encode())
            driver.take(source, "snapshot", None)
            driver.clone(source, "snapshot", new)
        self.assertEqual(b"new", self.read(driver.open("newer"), 3))
        driver.revert("new", "snapshot")
        self.assertEqual(b"new", self.read(driver.open("new"), 3))
        self.assertEqual(frozenset(), driver.snapshots("newer"))

    def test_what_a_snapshot_keeps_can_be_read(self) -> None:
        driver = self.vm_disk()
        self.wrote(driver, b"then")
        driver.take("vm", "snapshot", None)
        self.wrote(driver, b"late")
        with driver.reading("vm", "snapshot") as device:
            self.assertEqual((b"then", self.origin.size), (self.read(device, 4), device.size))
            self.assert_holds(driver, b"late")
        driver.drop("vm", "snapshot", None)

    def test_a_disk_gets_another_name(self) -> None:
        driver = self.vm_disk()
        self.wrote(driver, b"then")
        before = driver.open("vm")
        for _ in range(2):
            renamed = driver.rename("vm", "new")
        self.assertEqual(before.size, renamed.size)
        self.assertEqual((b"then", {"new"}), (self.read(renamed, 4), self.make().existing()))
        self.assertRaises(VmDiskMissing, driver.open, "vm")
        driver.create("vm", self.origin, self.origin.size)
        self.assertRaises(BadDisk, driver.rename, "vm", "new")
        self.assertEqual({"new", "vm"}, driver.existing())
        driver.delete("vm")
        self.assertEqual(b"then", self.read(driver.open("new"), 4))

    def test_its_snapshots_and_clones_go_along(self) -> None:
        driver = self.vm_disk()
        self.wrote(driver, b"then")
        driver.take("vm", "snapshot", None)
        driver.clone("vm", "snapshot", "clone")
        self.wrote(driver, b"late")
        driver.rename("vm", "new")
        self.assertEqual({"snapshot"}, driver.snapshots("new"))
        driver.rename("clone", "other")
        driver.create("vm", self.origin, self.origin.size)
        self.assertEqual(b"late", self.read(driver.open("new"), 4))
        driver.revert("new", "snapshot")
        driver.drop("new", "snapshot", None)
        for name in ("new", "other"):
            self.assertEqual(b"then", self.read(driver.open(name), 4))

    def test_what_differs_is_told(self) -> None:
        driver = self.vm_disk()
        self.assertEqual([], driver.changes("vm", None, None))
        self.wrote(driver, b"then")
        driver.take("vm", "snapshot", None)
        driver.take("vm", "same", None)
        self.assertEqual([], driver.changes("vm", "same", "snapshot"))
        self.assertEqual([], driver.changes("vm", None, "same"))
        self.wrote(driver, b"late")
        driver.take("vm", "late", None)
        for snapshot, since in (
            ("snapshot", None),
            ("late", None),
            ("late", "snapshot"),
            (None, "snapshot"),
            (None, None),
        ):
            changes = driver.changes("vm", snapshot, since)
            self.assertEqual(0, changes[0].offset)
            self.assertGreater(changes[0].length, 0)
            self.assertFalse(changes[0].zeros)
            self.assertLess(sum(change.length for change in changes), self.origin.size)
        self.assertEqual([], driver.changes("vm", None, "late"))

    def test_what_differs_ends_with_the_disk(self) -> None:
        driver = self.vm_disk()
        odd = self.origin.size + 512
        driver.resize("vm", odd, None)
        self.write_at(driver.open("vm"), odd - 512, b"last")
        last = driver.changes("vm", None, None)[-1]
        self.assertEqual(odd, last.offset + last.length)

    def test_what_a_vm_discards_is_not_of_its_disk_any_more_but_of_its_snapshots(self) -> None:
        driver = self.vm_disk()
        self.wrote(driver, b"then")
        driver.take("vm", "snapshot", None)
        self.wrote(driver, b"late")
        self.discard(driver.open("vm"), self.origin.size)
        self.assertEqual([], [change for change in driver.changes("vm", None, None) if not change.zeros])
        driver.revert("vm", "snapshot")
        self.assert_holds(driver, b"then")

    def test_of_no_snapshot_there_is_nothing_to_clone_or_read(self) -> None:
        driver = self.make()
        for error in (VmDiskMissing, SnapshotMissing):
            self.assertRaises(error, driver.clone, "vm", "snapshot", "new")
            self.assertRaises(error, driver.reading("vm", "snapshot").__enter__)
            self.assertRaises(error, driver.changes, "vm", "snapshot", None)
            self.assertRaises(error, driver.changes, "vm", None, "snapshot")
            driver.create("vm", self.origin, self.origin.size)
        self.assertEqual({"vm"}, driver.existing())

    def test_snapshots_of_no_disk_or_of_bad_names_are_refused(self) -> None:
        driver = self.make()
        for call in (driver.take, driver.drop):
            self.assertRaises(VmDiskMissing, call, "vm", "snapshot", None)
        self.assertRaises(VmDiskMissing, driver.resize, "vm", self.origin.size, None)
        self.assertRaises(VmDiskMissing, driver.revert, "vm", "snapshot")
        self.assertRaises(VmDiskMissing, driver.snapshots, "vm")
        self.assertRaises(VmDiskMissing, driver.rename, "vm", "new")
        driver.create("vm", self.origin, self.origin.size)
        self.assertRaises(SnapshotMissing, driver.revert, "vm", "snapshot")
        for name in BAD_NAMES:
            for call in (driver.take, driver.drop):
                self.assertRaises(BadName, call, name, "snapshot", None)
                self.assertRaises(BadName, call, "vm", name, None)
            self.assertRaises(BadName, driver.revert, "vm", name)
            self.assertRaises(BadName, driver.rename, "vm", name)
            self.assertRaises(BadName, driver.rename, name, "new")
            self.assertRaises(BadName, driver.revert, name, "snapshot")
            for arguments in ((name, "snapshot", "new"), ("vm", name, "new"), ("vm", "snapshot", name)):
                self.assertRaises(BadName, driver.clone, *arguments)
            for of in ((name, "snapshot", None), ("vm", name, None), ("vm", None, name)):
                self.assertRaises(BadName, driver.changes, *of)
        self.assertEqual(frozenset(), driver.snapshots("vm"))
