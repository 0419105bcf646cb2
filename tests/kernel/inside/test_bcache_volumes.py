"""The volumes of the bcache driver: added, removed, failing, and found again."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

from drivers.base import Device, Image, Place
from drivers.cache.bcache import BcacheCache
from drivers.cache.cachefiles import file_bytes
from drivers.cachemodels import Volume, VolumeState
from drivers.errors import BadDisk, BadVolume, DriverError, VolumeInUse
from drivers.host.command import run
from drivers.kernel import bcachedev, devmapper, loopdev
from tests.kernel.inside.caches import BcacheCase, Busy, fetched
from tests.kernel.inside.filesystems import small_file_system
from tests.kernel.inside.killing import killed_at
from tests.patience import wait_until

DISK = 2 << 30
"""Bytes of a disk, of which a sparse file is made."""
IMAGE = 4 << 20


def strangers(home: Path) -> list[str]:
    """What is attached to a volume and is not the agent's."""
    return [name for name in bcachedev.attached(home) if not name.startswith("virtman-")]


class VolumesTest(BcacheCase):
    """Disks are loop devices."""

    def setUp(self) -> None:
        super().setUp()
        self.default = self.place.state / "cache/pool"

    def disk(self, name: str = "disk", size: int = DISK) -> Path:
        file = self.folder / name
        with file.open("wb") as opened:
            opened.truncate(size)
        self.addCleanup(loopdev.detach, file)
        return loopdev.attach(file)

    def images(self, path: Path) -> tuple[str, ...]:
        return next(tuple(volume.images) for volume in self.cache.group.volumes() if volume.path == str(path))

    def states(self) -> dict[Path, str]:
        return {Path(volume.path): volume.state for volume in self.cache.group.volumes()}

    def tend(self) -> None:
        """As the agent does with a heartbeat."""
        for volume in self.cache.group.volumes():
            with contextlib.suppress(DriverError):
                self.cache.group.tend_volume(Path(volume.path))

    def assert_kept(self, image: Image, base: Device, path: Path) -> None:
        """It is read twice and fetched once."""
        self.assert_reads(image, path)
        before = fetched(base)
        self.assert_reads(image, path)
        self.assertLessEqual(fetched(base) - before, image.size // 20)

    def test_a_file_has_all_its_space_at_once_and_leaves_the_reserve(self) -> None:
        small = small_file_system(self, self.folder, "512M")
        image, base = self.new_base(size=IMAGE)
        for reserve, made in ((1 << 40, False), (64 << 20, True)):
            self.place = Place(state=small / "state", run=small / "run", reserve=reserve)
            self.cache = self.new_cache()
            self.assert_reads(image, self.opened(image, base))
            self.tend()
            pool = small / "state/cache/pool"
            self.assertEqual(made, pool.exists(), "without room for it reads go on")
            (volume,) = self.cache.group.volumes()
            self.assertEqual((str(pool), not made), (volume.path, "no room" in volume.trouble))
            self.cache.close(image)
        self.assertGreaterEqual(file_bytes(pool), pool.stat().st_size)
        self.assertGreaterEqual(shutil.disk_usage(small).free, 64 << 20)

    def test_a_volume_is_removed_from_a_full_file_system(self) -> None:
        small = small_file_system(self, self.folder, "512M")
        self.place = Place(state=small / "state", run=small / "run", reserve=0)
        self.cache = self.new_cache()
        image, base = self.new_base(size=IMAGE)
        path = self.opened(image, base)
        for size in (1 << 20, 512):
            with (small / f"rest-{size}").open("wb", buffering=0) as rest, contextlib.suppress(OSError):
                while rest.write(bytes(size)):
                    pass
        with mock.patch.object(tempfile, "tempdir", str(small)):
            self.cache.group.remove_volume(small / "state/cache/pool")
        self.assertFalse((small / "state/cache/pool").exists())
        self.assertEqual([], self.cache.group.volumes())
        self.assert_reads(image, path)

    def test_images_change_volumes_while_they_are_read(self) -> None:
        image, base = self.new_base(size=IMAGE)
        path = self.opened(image, base)
        self.assertEqual((image.name,), self.images(self.default))
        disk = self.disk()
        with Busy(self, lambda: self.assert_reads(image, path)):
            added = Volume(path=str(disk), size=DISK, state=VolumeState.RUNNING, images=[])
            self.assertEqual(added, self.cache.group.add_volume(disk))
            self.cache.group.remove_volume(self.default)
            self.assertEqual({disk: VolumeState.RUNNING}, self.states())
            self.assertEqual((image.name,), self.images(disk))
        self.assertFalse(self.default.exists())
        self.assert_kept(image, base, path)

    def test_an_image_without_a_volume_is_read_from_its_parents_until_there_is_one(self) -> None:
        image, base = self.new_base(size=IMAGE)
        self.cache.group.remove_volume(self.default)
        path = self.opened(image, base)
        self.assert_reads(image, path)
        self.assertEqual([], self.cache.group.volumes())
        self.assertEqual(0, self.cache.stats(image).held_bytes)
        file = self.folder / "volume"
        self.cache.group.add_volume(file)
        self.assertEqual(0, self.cache.stats(image).held_bytes)
        self.assert_kept(image, base, path)
        self.assertGreater(self.cache.stats(image).held_bytes, 0)
        self.cache.close(image)
        self.cache.group.remove_volume(file)
        self.assertFalse(file.exists())

    def test_an_image_joins_the_volume_with_the_most_room(self) -> None:
        small, large = self.disk("small"), self.disk("large", 3 * DISK)
        self.cache.group.add_volume(small)
        self.cache.group.add_volume(large)
        self.cache.group.remove_volume(self.default)
        for name in ("a", "b", "c"):
            self.opened(*self.new_base(name, 1 << 20))
        self.assertEqual(2, len(self.images(large)))
        self.assertEqual(1, len(self.images(small)))

    def test_volumes_are_found_again(self) -> None:
        disk = self.disk()
        self.cache.group.add_volume(disk)
        self.cache.group.remove_volume(self.default)
        image, base = self.new_base(size=IMAGE)
        self.assert_kept(image, base, self.opened(image, base))
        self.cache = BcacheCache(self.place)
        self.assertEqual({disk: VolumeState.RUNNING}, self.states())
        self.cache.close(image)
        self.assertEqual({disk: VolumeState.IDLE}, self.states())
        before = fetched(base)
        self.assert_reads(image, self.opened(image, base))
        self.assertLessEqual(fetched(base) - before, image.size // 20)

    def volume_on_a_map(self) -> tuple[Path, Path]:
        """A disk, and the only volume, which lies on it by a map."""
        disk = self.disk()
        volume = devmapper.create("virtman-test", [f"0 {DISK // devmapper.SECTOR} linear {disk} 0"])
        self.addCleanup(devmapper.remove, volume.name)
        self.addCleanup(self.cache.group.remove_volume, volume)
        self.cache.group.add_volume(volume)
        self.cache.group.remove_volume(self.default)
        return disk, volume

    def sleeping_volume(self) -> Path:
        """The only volume, which does not answer until its map is resumed."""
        _, volume = self.volume_on_a_map()
        run(["dmsetup", "suspend", volume.name])
        self.addCleanup(run, ["dmsetup", "resume", volume.name])
        return volume

    def test_a_disk_that_does_not_answer_is_left_out_and_runs_once_it_does(self) -> None:
        slow = self.sleeping_volume()
        images = [self.new_base(name, IMAGE) for name in ("a", "b", "c")]
        paths = [self.opened(*each) for each in images]
        self.assertEqual({slow: VolumeState.MISSING}, self.states())
        self.assert_reads(images[0][0], paths[0])
        self.cache = BcacheCache(self.place)  # an agent that starts meanwhile
        self.assertEqual({slow: VolumeState.MISSING}, self.states())
        run(["dmsetup", "resume", slow.name])
        self.tend()
        self.assertEqual({slow: VolumeState.RUNNING}, self.states())
        self.assertEqual(("a", "b", "c"), self.images(slow))
        self.assert_kept(*images[0], paths[0])

    def test_a_volume_to_which_somebody_else_attached_a_device_is_neither_removed_nor_stopped(self) -> None:
        disk, below = self.disk("theirs"), self.disk("below")
        top = Path("/dev/mapper/vg0-theirs")
        run(["dmsetup", "create", top.name, "--table", f"0 {DISK // devmapper.SECTOR} linear {below} 0"])
        self.addCleanup(run, ["dmsetup", "remove", "--retry", top.name])  # udev may look at it
        for device, called in ((disk, disk.name), (top, top.name)):
            image, base = self.new_base(called, IMAGE)
            path = self.opened(image, base)
            (name,) = devmapper.names("virtman-cachevol-")
            home = self.running(name)
            theirs = self.attached_by_somebody_else(device, home)
            error = self.assertRaises(VolumeInUse, self.cache.group.remove_volume, self.default)
            self.assertIn(called, str(error))
            self.assertEqual((called,), self.images(self.default))
            self.assertEqual([""], [volume.trouble for volume in self.cache.group.volumes()])
            self.assert_reads(image, path)
            self.cache.close(image)
            self.assertEqual([called], strangers(home))
            self.let_go(theirs, home)
            self.cache.group.remove_volume(self.default)
            self.assertEqual([], self.cache.group.volumes())
            self.cache.group.add_volume(self.default)
        self.cache.group.remove_volume(self.default)

    def attached_by_somebody_else(self, disk: Path, home: Path) -> Path:
        """Where bcache has the settings of a backing device that an administrator made and attached to a volume."""
        run(["make-bcache", "-B", str(disk)])
        Path("/sys/fs/bcache/register_quiet").write_text(str(disk))
        found = Path("/sys/dev/block", devmapper.number(disk), "bcache")
        wait_until(found.exists)

        self.addCleanup(self.stop, found)
        (found / "attach").write_text(home.name)
        return found

    def let_go(self, theirs: Path, home: Path) -> None:
        """The administrator's device leaves the volume."""
        (theirs / "detach").write_text("1")
        wait_until(lambda: not strangers(home))
        self.stop(theirs)

    def stop(self, theirs: Path) -> None:
        """Stop a backing device for good: by its superblock udev would have bcache take it again at once."""
        if theirs.exists():
            with Path("/dev/block", theirs.parent.name).open("r+b", buffering=0) as device:
                device.write(bytes(bcachedev.SUPERBLOCK))
                os.fsync(device.fileno())
            (theirs / "stop").write_text("1")
            wait_until(lambda: not theirs.exists())

    def test_a_volume_is_started_with_the_policy_that_takes_unused_space_first(self) -> None:
        self.opened(*self.new_base(size=IMAGE))
        (name,) = devmapper.names("virtman-cachevol-")
        for below in bcachedev.attached(self.running(name)):
            bcachedev.detach(below)
        self.assertIn("[random]", self.policy(name))
        bcachedev.stop(name)
        bcachedev.register(name)
        self.assertIn("[lru]", self.policy(name))

    def policy(self, name: str) -> str:
        return (self.running(name) / "cache0/cache_replacement_policy").read_text()

    def running(self, name: str) -> Path:
        found = bcachedev.running_set(name)
        assert found is not None
        return found

    def test_a_start_that_was_cut_short_is_finished(self) -> None:
        self.opened(*self.new_base("one", 1 << 20))
        (name,) = devmapper.names("virtman-cachevol-")
        devmapper.rename(name, name.replace("cachevol", "cachenew"))
        self.opened(*self.new_base("two", 1 << 20))
        self.assertEqual(("one", "two"), self.images(self.default))

    def test_the_first_volume_is_made_again_if_its_file_is_lost(self) -> None:
        image, base = self.new_base(size=IMAGE)
        self.opened(image, base)
        self.cache.close(image)
        self.default.unlink()
        self.cache = self.new_cache()
        path = self.opened(image, base)
        self.assertEqual({self.default: VolumeState.RUNNING}, self.states())
        self.assert_kept(image, base, path)

    def test_another_disk_under_the_path_of_a_volume_is_left_alone(self) -> None:
        disk = self.disk()
        self.cache.group.add_volume(disk)
        self.cache.group.remove_volume(self.default)
        loopdev.detach(self.folder / "disk")
        (self.folder / "disk").unlink()
        self.assertEqual(disk, self.disk())
        image, base = self.new_base(size=IMAGE)
        self.assert_reads(image, self.opened(image, base))
        self.assertEqual({disk: VolumeState.MISSING}, self.states())
        self.cache.group.remove_volume(disk)
        with disk.open("rb") as opened:
            self.assertFalse(any(opened.read(1 << 20)))

    def test_a_volume_that_is_removed_is_free_for_others(self) -> None:
        disk = self.disk()
        self.cache.group.add_volume(disk)
        self.assertEqual([True, False], [self.cache.group.remove_volume(disk) for _ in range(2)])
        run(["mke2fs", "-q", str(disk), "1M"])
        self.assertRaises(BadVolume, self.cache.group.add_volume, disk)

    def test_what_may_hold_data_is_no_volume(self) -> None:
        text = self.folder / "text"
        text.write_text("data")
        unknown = self.disk("unknown")
        with unknown.open("r+b") as opened:
            opened.seek(12345)
            opened.write(b"data")
        used = self.disk("used")
        devmapper.create("virtman-testused", [f"0 8 linear {used} 0"])
        self.addCleanup(devmapper.remove, "virtman-testused")
        large = self.disk("sectors-of-4-kib")
        run(["losetup", "--sector-size", "4096", str(large)])
        bad = [
            text,
            unknown,
            used,
            large,
            self.folder,
            Path("/dev/null"),
            self.disk("small", 1 << 20),
            Path("relative"),
        ]
        for path in [*bad, self.folder / "no/file"]:
            self.assertRaises(BadVolume, self.cache.group.add_volume, path)
        self.assertEqual("data", text.read_text())
        self.assertEqual([self.default], [Path(volume.path) for volume in self.cache.group.volumes()])

    def test_reads_go_on_when_a_volume_fails_which_begins_empty_once_it_can(self) -> None:
        disk, failing = self.volume_on_a_map()
        image, base = self.new_base(size=IMAGE)
        path = self.opened(image, base)
        self.assert_reads(image, path)
        devmapper.reload(failing.name, [f"0 {DISK // 512} error"])
        self.read_until_failed(image, path, failing)
        self.assertRaises(DriverError, self.cache.group.tend_volume, failing)
        (volume,) = self.cache.group.volumes()
        self.assertEqual((VolumeState.FAILED, []), (volume.state, volume.images))
        self.assertNotEqual("", volume.trouble)
        self.assert_reads(image, path)
        devmapper.reload(failing.name, [f"0 {DISK // 512} linear {disk} 0"])
        self.cache.group.tend_volume(failing)
        self.assertEqual({failing: VolumeState.RUNNING}, self.states())
        self.cache.stats(image)
        self.assert_kept(image, base, path)

    def read_until_failed(self, image: Image, path: Path, volume: Path) -> None:
        """bcache forgives some errors of the disk."""
        for _ in range(20):
            self.assert_reads(image, path, 4096)
            if self.states()[volume] == VolumeState.FAILED:
                return
        self.fail(f"{volume} has not failed")

    def image_by_a_small_volume(self) -> tuple[Image, Path]:
        """An image, and where it is read, by way of a volume that takes few images."""
        self.cache = BcacheCache(self.place, pool_size=256 << 20, bucket=16 << 10)
        image, base = self.new_base(size=IMAGE)
        return image, self.opened(image, base)

    def fill(self) -> None:
        """Let the first image go and come until its volume has given all numbers away."""
        (below,) = devmapper.names("virtman-cacheof-base-")
        home = bcachedev.set_of(below)
        assert home is not None
        for _ in range((16 << 10) // 128):
            bcachedev.detach(below)
            bcachedev.attach(below, home)
            if bcachedev.set_of(below) is None:
                break
        else:
            self.fail("there is still a number left")

    def test_a_volume_that_takes_no_more_images_starts_empty(self) -> None:
        image, path = self.image_by_a_small_volume()
        self.fill()
        other, other_base = self.new_base("other", IMAGE)
        other_path = self.opened(other, other_base)
        self.tend()
        self.assertEqual(("base", "other"), self.images(self.default))
        self.assert_reads(other, other_path)
        self.assert_reads(image, path)

    def test_one_that_was_not_released_in_time_is_removed_with_the_next_try(self) -> None:
        image, base = self.new_base(size=IMAGE)
        path = self.opened(image, base)
        (name,) = devmapper.names("virtman-cachevol-")
        with devmapper.map_path(name).open("rb"):
            self.assertRaises(DriverError, self.cache.group.remove_volume, self.default)
        self.assertEqual({self.default: VolumeState.IDLE}, self.states())
        self.assert_reads(image, path)
        self.cache.group.remove_volume(self.default)
        self.assertEqual([], self.cache.group.volumes())
        self.assertFalse(self.default.exists())

    def test_a_removal_that_is_killed_is_finished(self) -> None:
        image, base = self.new_base(size=IMAGE)
        for number in itertools.count(1):
            self.cache.group.add_volume(self.default)
            path = self.opened(image, base)
            remove = partial(self.new_cache().group.remove_volume, self.default)
            code = killed_at(number, remove, self.folder / "programs", before=bool(number % 2))
            self.cache = self.new_cache()
            self.tend()
            self.assert_reads(image, path)
            self.assertEqual([], self.cache.group.volumes())
            self.assertFalse(self.default.exists())
            self.assertEqual(frozenset(), devmapper.names("virtman-cachevol-") | devmapper.names("virtman-cachenew-"))
            if code == 0:
                break

    def test_what_took_the_place_of_a_full_volume_is_left_alone(self) -> None:
        image, path = self.image_by_a_small_volume()
        self.opened(*self.new_base("kept", IMAGE))
        self.fill()
        self.opened(*self.new_base("other", IMAGE))
        self.default.rename(self.folder / "moved")
        self.addCleanup((self.folder / "moved").rename, self.default)
        theirs = b"theirs" * 4096
        self.default.write_bytes(theirs)
        os.truncate(self.default, 256 << 20)
        self.assertRaises(BadVolume, self.cache.group.tend_volume, self.default)
        with self.default.open("rb") as file:
            self.assertEqual(theirs, file.read(len(theirs)))
        self.assertEqual(("kept",), self.images(self.default), "it was sent away for nothing")
        self.assert_reads(image, path)

    def test_a_volume_that_refuses_an_image_for_another_reason_keeps_what_it_holds(self) -> None:
        image, base = self.new_base(size=IMAGE)
        path = self.opened(image, base)
        self.assert_kept(image, base, path)
        other, other_base = self.new_base("other", IMAGE)
        (header,) = (self.place.state / "cache").glob("*.header")
        # A copy has the same identity, and bcache takes no second one.
        shutil.copy(header, header.with_name(f"{other.key}-{other.name}.header"))
        self.assert_reads(other, self.opened(other, other_base))
        self.assertRaises(BadDisk, self.cache.group.tend_volume, self.default)
        self.assertEqual(("base",), self.images(self.default))
        for _ in range(2):
            self.cache.stats(image)  # as heartbeats, which free the memory below bcache
        before = fetched(base)
        self.assert_reads(image, path)
        self.assertLessEqual(fetched(base) - before, image.size // 20)
