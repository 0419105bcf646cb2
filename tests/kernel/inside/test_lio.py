"""The kernel's iSCSI target, seen from configfs and by an initiator on the same machine."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rtslib_fb
from testtools import ExpectedException, TestCase

from drivers.base import Child, Device, Image, Place
from drivers.errors import BadDevice, CommandFailed
from drivers.export.lio import LioExport
from drivers.host.command import run
from drivers.iscsi.names import target_name
from drivers.kernel import devmapper, loopdev
from tests.contracts import drivers as contracts
from tests.kernel.inside import iscsi_tools
from tests.kernel.inside.folders import state_folder
from tests.kernel.inside.iscsi_tools import CHECK_CONDITION, DATA_PROTECT, SECRET, log_in, log_out
from tests.patience import PATIENCE, wait_until

pytestmark = iscsi_tools.RTSLIB_WARNS

HOST = socket.gethostname()
IP = "127.0.0.1"
PORTAL = f"{IP}:3260"
SIZE = 4 << 20
LOGIN_REFUSED = 24
"""iscsiadm(8), exit status: login failed due to authorization failure."""

PARTITION_SCAN = 64 << 10
"""Bytes that the kernel itself may read of a new disk."""

WAITS = 2.0
"""Seconds without an answer, after which a read counts as one that waits."""

MULTIPATH = f"0 {SIZE // devmapper.SECTOR} multipath 3 queue_if_no_path queue_mode bio 0"
"""A table but for its paths. Without any, reads are held."""

CONFIGFS = Path("/sys/kernel/config/target/iscsi")


def plain(device: Path) -> str:
    """The name of a map's device that rtslib takes."""
    return f"/dev/dm-{os.minor(device.stat().st_rdev)}"


class LioCase(TestCase):
    """A target that this guest serves to itself."""

    def setUp(self) -> None:
        super().setUp()
        self.folder = state_folder(self)
        self.export = self.new_driver()
        iscsi_tools.expect_nothing_left(self, self.export)
        self.content = os.urandom(SIZE)
        self.image = self.new_image("Debian_12", self.content)
        self.target = target_name(HOST, self.image.name)
        self.addCleanup(self.export.withdraw, self.image.name)

    def new_driver(self) -> LioExport:
        return LioExport(Place(self.folder, self.folder, host=HOST, address=IP), died=self.fail)

    def new_image(self, name: str, content: bytes) -> Image:
        (self.folder / name).write_bytes(content)
        return Image(name, len(content), f"sha256:{hashlib.sha256(content).hexdigest()}")

    def device_of(self, image: Image) -> Device:
        return Device(image.size, self.folder / image.name)

    def publish(self) -> None:
        self.export.publish(self.image, self.device_of(self.image))

    def serve(self) -> None:
        """Publish the image, and let this guest read it."""
        self.publish()
        self.export.allow(self.image.name, [Child(HOST, SECRET)])

    def local(self) -> Path:
        """Where this host's own disks read the image."""
        return contracts.path_of(self.export.local(self.image))

    def log_in(self, secret: str = SECRET) -> None:
        self.addCleanup(log_out, self.target, PORTAL)
        log_in(self.target, PORTAL, secret)

    def attach(self) -> Path:
        self.log_in()
        [disk] = iscsi_tools.disks_of(self.target)
        return disk

    def names_in(self) -> set[str]:
        """The initiators with an ACL."""
        return {path.name for path in (CONFIGFS / self.target / "tpgt_1/acls").iterdir()}

    def without_parents(self) -> Device:
        """A device that holds all reads until the end of the test, or until ``parents_are_back``."""
        path = devmapper.create("virtman-test", [f"{MULTIPATH} 0 0"], read_only=True)
        self.addCleanup(devmapper.remove, "virtman-test")
        self.addCleanup(self.export.withdraw, self.image.name)
        self.addCleanup(self.parents_are_back)
        return Device(SIZE, path)

    def parents_are_back(self) -> None:
        with loopdev.held(self.folder / self.image.name) as source:
            table = f"{MULTIPATH} 1 1 round-robin 0 1 0 {devmapper.number(source)}"
            devmapper.reload("virtman-test", [table], read_only=True)

    def waiting_reader(self) -> subprocess.Popen[bytes]:
        """A process that reads the first sectors of the disk of a child, below which reads are held."""
        self.export.allow(self.image.name, [Child(HOST, SECRET)])
        disk = self.attach()
        self.export.publish(self.image, self.without_parents())
        reader = subprocess.Popen(["dd", f"if={disk}", "of=/dev/null", "bs=64k", "count=1", "iflag=direct"])
        self.addCleanup(reader.wait)
        self.addCleanup(self.parents_are_back)  # before anybody waits for the reader
        self.assertRaises(subprocess.TimeoutExpired, reader.wait, WAITS)
        return reader

    def do_while_reads_wait(self, act: Callable[[], None]) -> None:
        """Do it; AssertionError, and the reads are let go, if it waits for them."""
        with ThreadPoolExecutor() as pool:
            doing = pool.submit(act)
            try:
                doing.result(PATIENCE)
            except TimeoutError as error:
                self.parents_are_back()
                raise AssertionError("it waited for reads") from error


class ContractTest(LioCase, contracts.ExportContract):
    """The contract of all export drivers."""

    def setUp(self) -> None:
        super().setUp()
        (self.folder / "other").write_bytes(self.content)
        self.device, self.other = (Device(SIZE, self.folder / name) for name in (self.image.name, "other"))

    def make(self) -> LioExport:
        return self.new_driver()


class LioTest(LioCase):
    """What holds for this driver."""

    def test_allowed_host_reads_what_was_published_and_so_do_own_disks(self) -> None:
        self.serve()
        self.assertTrue(self.export.serving(self.image.name))
        self.assertEqual([self.content] * 2, [path.read_bytes() for path in (self.attach(), self.local())])

    def test_nothing_is_served_by_a_target_that_is_closed(self) -> None:
        self.publish()
        for word, open_ in (("0", False), ("1", True)):
            (CONFIGFS / self.target / "tpgt_1/enable").write_text(word)
            self.assertEqual(open_, self.export.serving(self.image.name))

    def test_images_of_one_file_are_published_and_withdrawn_side_by_side(self) -> None:
        images = [Image(f"image-{number}", SIZE, self.image.digest) for number in range(5)]
        for image in images:
            self.addCleanup(self.export.withdraw, image.name)

        def publish_and_read(image: Image) -> str:
            self.export.publish(image, self.device_of(self.image))
            digest = hashlib.sha256(contracts.path_of(self.export.local(image)).read_bytes()).hexdigest()
            self.assertIn(image.name, self.export.existing())
            self.export.withdraw(image.name)
            return f"sha256:{digest}"

        with ThreadPoolExecutor(len(images)) as pool:
            for _ in range(3):
                self.assertEqual({self.image.digest}, set(pool.map(publish_and_read, images)))
        self.assertEqual(frozenset(), self.export.existing())
        run(["udevadm", "settle"])  # it may have the device open for a look
        self.assertEqual(None, loopdev.device_of(self.folder / self.image.name))

    def test_host_that_was_not_named_or_has_a_wrong_secret_is_refused(self) -> None:
        self.publish()
        for child in (Child("somebody-else", SECRET), Child(HOST, "another secret")):
            self.export.allow(self.image.name, [child])
            self.assertEqual(LOGIN_REFUSED, self.assertRaises(CommandFailed, self.log_in).code)

    def test_host_that_is_not_named_any_more_loses_its_session(self) -> None:
        self.serve()
        self.attach()
        self.export.allow(self.image.name, [])
        wait_until(lambda: not self.names_in())
        log_out(self.target, PORTAL)
        self.assertEqual(LOGIN_REFUSED, self.assertRaises(CommandFailed, self.attach).code)

    def test_host_whose_read_waits_is_sent_away_and_holds_nobody_up(self) -> None:
        self.publish()
        reader = self.waiting_reader()

        def send_away_and_publish() -> None:
            self.export.allow(self.image.name, [])
            self.export.publish(self.image, Device(SIZE, devmapper.map_path("virtman-test")))

        self.do_while_reads_wait(send_away_and_publish)
        self.assertIs(None, reader.poll())
        self.assertEqual([], list(CONFIGFS.glob(f"{self.target}/tpgt_1/acls/*/lun_*")))
        self.parents_are_back()
        self.assertEqual(0, reader.wait(PATIENCE))
        wait_until(lambda: not self.names_in())
        log_out(self.target, PORTAL)
        self.assertEqual(LOGIN_REFUSED, self.assertRaises(CommandFailed, self.attach).code)

    def test_host_that_is_let_in_again_while_its_read_waits_keeps_its_session(self) -> None:
        self.publish()
        reader = self.waiting_reader()
        self.do_while_reads_wait(lambda: self.export.allow(self.image.name, []))
        self.do_while_reads_wait(lambda: self.export.allow(self.image.name, [Child(HOST, SECRET)]))
        self.parents_are_back()
        self.assertEqual(0, reader.wait(PATIENCE))
        [disk] = iscsi_tools.disks_of(self.target)
        self.assertEqual(self.content, disk.read_bytes())

    def test_parent_refuses_a_write(self) -> None:
        self.serve()
        answer = iscsi_tools.write_first_sector(self.attach())
        self.assertEqual((CHECK_CONDITION, DATA_PROTECT), (answer.status, answer.sense_key))
        self.assertEqual(self.content, (self.folder / self.image.name).read_bytes())

    def siblings_disk(self) -> Path:
        """The image's disk as another child of this guest has it, by a target of its own."""
        place = Place(self.folder, self.folder, host="sibling", address=IP)
        other, target = LioExport(place, died=self.fail), target_name("sibling", self.image.name)
        self.addCleanup(other.withdraw, self.image.name)
        other.publish(self.image, self.device_of(self.image))
        other.allow(self.image.name, [Child(HOST, SECRET)])
        self.addCleanup(log_out, target, PORTAL)
        log_in(target, PORTAL)
        [disk] = iscsi_tools.disks_of(target)
        return disk

    def test_no_child_can_reserve_the_disk(self) -> None:
        self.serve()
        sibling, disk = self.siblings_disk(), self.attach()
        answers = iscsi_tools.reserve(sibling), iscsi_tools.register(sibling)
        self.assertEqual([CHECK_CONDITION] * 2, [answer.status for answer in answers])
        self.assertEqual(self.content, disk.read_bytes())

    def test_replacing_the_device_is_no_error_to_a_reader(self) -> None:
        self.serve()
        disk = self.attach()
        copy = self.folder / "copy"
        copy.write_bytes(self.content)
        device = loopdev.attach(copy, read_only=True)
        self.addCleanup(loopdev.detach, copy)
        with disk.open("rb") as reader:
            first = reader.read(SIZE // 2)
            self.export.publish(self.image, Device(SIZE, device), replace=True)
            self.assertEqual(self.content, first + reader.read())
        self.assertIn(devmapper.number(device), devmapper.table(f"virtman-image-{self.image.name}"))

    def test_withdrawn_image_holds_the_reads_of_a_disk_on_it_until_it_is_back(self) -> None:
        self.publish()
        devmapper.create("virtman-test", [f"0 {SIZE // 512} linear {self.local()} 0"], read_only=True)
        self.addCleanup(devmapper.remove, "virtman-test")
        self.export.withdraw(self.image.name)
        self.assertIs(None, loopdev.device_of(self.folder / self.image.name))
        copy = ["dd", "if=/dev/mapper/virtman-test", f"of={self.folder / 'copy'}", "iflag=direct", "bs=64k"]
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(run, copy)
            self.publish()
            reading.result()
        self.assertEqual(self.content, (self.folder / "copy").read_bytes())

    def test_reads_that_the_device_fails_wait_until_it_is_published_again(self) -> None:
        self.serve()
        disk = self.attach()
        error, copy = f"0 {SIZE // devmapper.SECTOR} error", self.folder / "copy"
        broken = devmapper.create("virtman-test", [error], read_only=True)
        self.addCleanup(devmapper.remove, broken.name)
        self.addCleanup(self.export.withdraw, self.image.name)
        with loopdev.held(self.folder / self.image.name) as source:
            mended = f"0 {SIZE // devmapper.SECTOR} linear {source} 0"
            for path in (disk, self.local()):  # a child's reads, and a VM's
                for later in (self.device_of(self.image), Device(SIZE, broken)):
                    devmapper.reload(broken.name, [error], read_only=True)
                    self.export.publish(self.image, Device(SIZE, broken))
                    self.assertTrue(self.export.serving(self.image.name))
                    with ThreadPoolExecutor() as pool:
                        dd = ["dd", f"if={path}", f"of={copy}", "iflag=direct", "bs=64k"]
                        reading = pool.submit(run, dd, timeout=PATIENCE)
                        wait_until(lambda: not self.export.serving(self.image.name))
                        devmapper.reload(broken.name, [mended], read_only=True)
                        self.export.publish(self.image, later)
                        reading.result()
                    self.assertEqual((True, self.content), (self.export.serving(self.image.name), copy.read_bytes()))
            self.export.withdraw(self.image.name)
            devmapper.remove(broken.name)

    def test_nobody_probes_its_maps_and_disks(self) -> None:
        self.serve()
        disk = self.attach()
        run(["udevadm", "trigger", "--settle", "--action=change", "/sys/block/" + disk.name])
        links = run(["udevadm", "info", "--query=symlink", str(disk)]).stdout.split()
        self.assertEqual([f"virtman/{disk.name}"], links, "the one by which LVM leaves it alone")
        scanned = int((Path("/sys/block") / disk.name / "stat").read_text().split()[2]) * devmapper.SECTOR
        self.assertLess(scanned, PARTITION_SCAN)

    def test_publishing_twice_changes_nothing(self) -> None:
        self.publish()
        there = iscsi_tools.what_is_there()
        self.new_driver().publish(self.image, self.device_of(self.image))
        self.assertEqual(there, iscsi_tools.what_is_there())

    def test_other_content_under_the_name_replaces_the_disk(self) -> None:
        self.publish()
        (self.folder / self.image.name).unlink()
        other = self.new_image(self.image.name, os.urandom(2 * SIZE))
        self.export.publish(other, self.device_of(other))
        self.assertEqual(other.digest, f"sha256:{hashlib.sha256(self.local().read_bytes()).hexdigest()}")

    def test_half_made_parts_are_completed(self) -> None:
        self.export.reserve(self.image.name)
        lun = CONFIGFS / self.target / "tpgt_1/lun/lun_0"
        lun.mkdir()
        disk = Path("/sys/kernel/config/target/core/iblock_0")
        (disk / f"virtman-{self.image.name}").mkdir(parents=True)
        self.serve()
        self.assertEqual(self.content, self.attach().read_bytes())

    def test_a_disk_over_another_device_is_replaced(self) -> None:
        self.publish()
        disk = self.disk()
        name, wwn = disk.name, disk.wwn
        disk.delete()
        path = contracts.path_of(self.without_parents())
        # As targetcli's service brings it back, when its device's number is another one's.
        disk = rtslib_fb.BlockStorageObject(name, dev=plain(path), wwn=wwn, readonly=True)
        disk.set_attribute("emulate_model_alias", 1)
        self.publish()
        self.assertEqual(plain(devmapper.map_path(f"virtman-export-{self.image.name}")), self.disk().udev_path)

    def disk(self) -> Any:
        [disk] = [disk for disk in rtslib_fb.RTSRoot().storage_objects if disk.name.endswith(self.image.name)]
        return disk

    def test_a_host_whose_address_is_another_one_is_reached_there(self) -> None:
        self.serve()
        disk = self.attach()
        place = Place(self.folder, self.folder, host=HOST, address="127.0.0.2")
        self.addCleanup(self.export.reserve, self.image.name)  # to log out
        LioExport(place, died=self.fail).publish(self.image, self.device_of(self.image))
        self.assertEqual(self.content, disk.read_bytes(), "a child that has yet to hear of it")
        portal = PORTAL.replace(IP, "127.0.0.2")
        self.assertEqual([portal], [path.name for path in (CONFIGFS / self.target / "tpgt_1/np").iterdir()])
        log_out(self.target, PORTAL)
        self.addCleanup(log_out, self.target, portal)
        log_in(self.target, portal)
        self.assertEqual(1, len(iscsi_tools.disks_of(self.target)))

    def test_refuses_a_device_of_another_size(self) -> None:
        with ExpectedException(BadDevice):
            self.export.publish(self.image, Device(SIZE * 2, self.folder / self.image.name))
        with ExpectedException(BadDevice):
            self.export.publish(self.image, Device(SIZE, self.folder / "missing"))
        self.assertFalse(self.export.serving(self.image.name))
