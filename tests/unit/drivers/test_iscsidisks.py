"""What the kernel is asked of a disk that is not the image, on files like those of sysfs."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from testtools import TestCase

from drivers.base import Image
from drivers.iscsi.disks import Asking, alien, lasting_number_of, number_of
from drivers.iscsi.names import DISK, serial_of
from drivers.iscsi.records import Target
from drivers.iscsi.sessions import Session

IMAGE = Image("debian", 1 << 20, f"sha256:{'a' * 64}")
TARGET = Target("iqn.2026-01.org.virtman:host-1:debian", "10.9.0.2", 3260)


class DiskTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.disk = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.disk)
        (self.disk / "device").mkdir()
        self.write("size", str(IMAGE.size // 512))
        self.write("device/vpd_pg80", f"\0\x80\0 {serial_of(IMAGE)}")

    def write(self, name: str, text: str) -> None:
        (self.disk / name).write_text(text)

    def asked(self, asking: Asking | None = None, target: Target = TARGET) -> list[str]:
        """What was written to, in the order of names."""
        (asking or Asking()).ask(target, self.disk)
        written = sorted(path for path in (self.disk / "device").iterdir() if path.read_text() == "1")
        for path in written:
            path.unlink()
        return [path.name for path in written]

    def test_the_images_disk_is_known(self) -> None:
        self.assertEqual("", alien(self.disk, IMAGE))

    def test_one_without_a_size_is_asked_again(self) -> None:
        self.write("size", "0")
        self.assertEqual("its disk is of another size", alien(self.disk, IMAGE))
        self.assertEqual(["rescan"], self.asked())

    def test_one_of_another_image_is_asked_again(self) -> None:
        self.write("device/vpd_pg80", "another")
        self.assertEqual("its disk is of another image", alien(self.disk, IMAGE))
        self.assertEqual(["rescan"], self.asked())

    def test_one_without_a_serial_number_is_dropped_to_be_found_anew(self) -> None:
        (self.disk / "device/vpd_pg80").unlink()
        self.assertEqual("its disk is of another image", alien(self.disk, IMAGE))
        self.assertEqual(["delete"], self.asked())


class PathTest(TestCase):
    """The disk of a session as a path to the image."""

    def setUp(self) -> None:
        super().setUp()
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        self.session = Session(1, Target("iqn", "127.0.0.1", 3260, "secret"), logged_in=True, device=folder)
        self.disk = self.session.device / f"target1:0:0/1:0:0:{DISK}/block/sda"
        (self.disk / "device").mkdir(parents=True)
        self.write("dev", "8:0\n")
        self.write("size", f"{IMAGE.size // 512}\n")
        self.write("device/state", "running\n")
        self.write("device/vpd_pg80", f"\0\x80\0 {serial_of(IMAGE)}")

    def write(self, name: str, text: str) -> None:
        (self.disk / name).write_text(text)

    def test_the_images_disk_is_one(self) -> None:
        self.assertEqual("8:0", number_of(self.session, IMAGE))

    def test_there_is_none_without_a_session_that_is_logged_in(self) -> None:
        self.assertIsNone(number_of(None, IMAGE))
        self.assertIsNone(number_of(replace(self.session, logged_in=False), IMAGE))

    def test_a_disk_that_is_blocked_or_given_up_is_none(self) -> None:
        for state in ("transport-offline", "blocked", "offline"):
            self.write("device/state", state)
            self.assertIsNone(number_of(self.session, IMAGE), state)
            self.assertEqual("", alien(self.disk, IMAGE), "it is the image's all the same")
            self.assertEqual("8:0", lasting_number_of(replace(self.session, logged_in=False), IMAGE))

    def test_a_disk_of_another_image_or_size_is_none(self) -> None:
        for other in (
            Image("debian", IMAGE.size, f"sha256:{'b' * 64}"),
            Image("debian", IMAGE.size + 512, IMAGE.digest),
        ):
            self.assertIsNone(number_of(self.session, other))
            self.assertIsNone(lasting_number_of(self.session, other))
        self.assertIsNone(lasting_number_of(None, IMAGE))
