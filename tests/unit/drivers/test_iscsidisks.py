"""Whether a disk is the image, on files like those of sysfs."""

from __future__ import annotations

from dataclasses import replace

from testtools import TestCase

from drivers.base import Image
from drivers.iscsi.disks import alien, number_of, readable_number_of
from drivers.iscsi.names import DISK, serial_of
from drivers.iscsi.records import Target
from drivers.iscsi.sessions import Session
from tests.unit.virtman.scene import folder_for

IMAGE = Image("debian", 1 << 20, f"sha256:{'a' * 64}")


class PathTest(TestCase):
    """The disk of a session as a path to the image."""

    def setUp(self) -> None:
        super().setUp()
        folder = folder_for(self)
        self.session = Session(str(folder), Target("iqn", "127.0.0.1", 3260, "secret"), logged_in=True)
        self.disk = folder / f"device/target1:0:0/1:0:0:{DISK}/block/sda"
        (self.disk / "device").mkdir(parents=True)
        self.write("dev", "8:0\n")
        self.write("size", f"{IMAGE.size // 512}\n")
        self.write("device/state", "running\n")
        self.write("device/vpd_pg80", f"\0\x80\0 {serial_of(IMAGE)}")

    def write(self, name: str, text: str) -> None:
        (self.disk / name).write_text(text)

    def test_the_images_disk_is_one(self) -> None:
        self.assertEqual("8:0", readable_number_of(self.session, IMAGE))

    def test_there_is_none_without_a_session_that_is_logged_in(self) -> None:
        self.assertIsNone(readable_number_of(None, IMAGE))
        self.assertIsNone(readable_number_of(replace(self.session, logged_in=False), IMAGE))

    def test_a_disk_that_is_blocked_or_given_up_is_none(self) -> None:
        for state in ("transport-offline", "blocked", "offline"):
            self.write("device/state", state)
            self.assertIsNone(readable_number_of(self.session, IMAGE), state)
            self.assertEqual("", alien(self.disk, IMAGE), "it is the image's all the same")
            self.assertEqual("8:0", number_of(replace(self.session, logged_in=False), IMAGE))

    def test_a_disk_of_another_size_or_image_or_without_a_serial_number_is_none(self) -> None:
        self.assertEqual("", alien(self.disk, IMAGE))
        for name, text in (("size", "0"), ("device/vpd_pg80", "another")):
            self.write(name, text)
            self.assertIn("its disk is of another", alien(self.disk, IMAGE))
        (self.disk / "device/vpd_pg80").unlink()
        self.assertIn("its disk is of another", alien(self.disk, IMAGE))

    def test_a_path_to_another_image_is_none(self) -> None:
        for other in (
            Image("debian", IMAGE.size, f"sha256:{'b' * 64}"),
            Image("debian", IMAGE.size + 512, IMAGE.digest),
        ):
            self.assertIsNone(readable_number_of(self.session, other))
            self.assertIsNone(number_of(self.session, other))
        self.assertIsNone(number_of(None, IMAGE))
