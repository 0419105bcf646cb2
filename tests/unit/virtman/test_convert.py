"""Whole disks are copied into files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

from testtools.matchers import Contains

from drivers.base import Device
from drivers.host.space import Room
from tests.unit.virtman.imagefiles import CONTENT, MIB, ImagesTest, qemu_img
from virtman.client import silently
from virtman.convert import QCOW2, RAW, Content, convert, of_device
from virtman.errors import BadRequest, Conflict, HostTrouble, NoRoom
from virtman.newfile import new_file


class ConvertTest(ImagesTest):
    def copy(self, content: Content, image_format: str) -> Path:
        target = self.folder / "copy"
        with new_file(target) as file:
            convert(content, file.path, image_format, silently, self.room)
        return target

    def raw_of(self, path: Path) -> bytes:
        qemu_img("convert", "-f", "qcow2", "-O", "raw", path, self.folder / "raw-again")
        return (self.folder / "raw-again").read_bytes()

    def test_a_path_and_a_node_are_read_alike(self) -> None:
        node = {"driver": "qcow2", "file": {"driver": "file", "filename": str(self.qcow2())}}
        for device in (Device(len(CONTENT), self.raw), Device(len(CONTENT), Path("/nonexistent"), node)):
            target = self.copy(of_device("x", device), RAW)
            self.assertEqual(CONTENT, target.read_bytes())
            target.unlink()

    def test_the_copy_is_sparse(self) -> None:
        target = self.copy(of_device("x", Device(len(CONTENT), self.raw)), RAW)
        self.assertLess(target.stat().st_blocks * 512, 2 * MIB)

    def test_a_qcow2_stands_alone(self) -> None:
        over = self.folder / "over.qcow2"
        qemu_img("create", "-f", "qcow2", "-F", "raw", "-b", self.raw, over)
        node = {"driver": "qcow2", "file": {"driver": "file", "filename": str(over)}}
        target = self.copy(of_device("x", Device(len(CONTENT), over, node)), QCOW2)
        self.raw.unlink()
        over.unlink()
        self.assertEqual(CONTENT, self.raw_of(target))

    def test_what_cannot_be_read_leaves_nothing(self) -> None:
        gone = of_device("the disk of vm x", Device(512, self.folder / "gone"))
        error = self.assertRaises(HostTrouble, self.copy, gone, RAW)
        self.assertThat(str(error), Contains("cannot copy the disk of vm x"))
        self.assertEqual([self.raw], list(self.folder.iterdir()))

    def test_the_disk_that_fills_up_is_told_and_nothing_is_left(self) -> None:
        self.raw.write_bytes(b"x" * 4 * MIB)
        folder, disk = self.tiny(2 * MIB), of_device("the disk of vm x", Device(4 * MIB, self.raw))

        def fill() -> None:
            with new_file(folder / "copy") as file:
                convert(disk, file.path, RAW, silently, Room(folder))

        error = self.assertRaises(NoRoom, fill)
        self.assertThat(str(error), Contains(f"no space left in {folder} for the disk of vm x"))
        self.assertEqual([], list(folder.iterdir()))


class NewFileTest(ImagesTest):
    def setUp(self) -> None:
        super().setUp()
        self.raw.unlink()
        self.path = self.folder / "new"

    def left(self) -> list[str]:
        return [path.name for path in self.folder.iterdir()]

    def test_it_is_not_there_before_it_is_whole(self) -> None:
        with new_file(self.path) as file:
            file.path.write_bytes(b"content")
            self.assertEqual([], self.left())
        self.assertEqual((["new"], b"content"), (self.left(), self.path.read_bytes()))

    def test_only_its_owner_may_read_it(self) -> None:
        with new_file(self.path):
            pass
        self.assertEqual(0o600, self.path.stat().st_mode & 0o7777)

    def cut_off(self) -> None:
        with new_file(self.path):
            raise KeyError

    def test_after_an_error_there_is_nothing(self) -> None:
        self.assertRaises(KeyError, self.cut_off)
        self.assertEqual([], self.left())

    def fill(self) -> None:
        with new_file(self.path) as file:
            file.path.write_bytes(b"content")

    def test_what_is_there_is_left_alone(self) -> None:
        self.path.symlink_to("nowhere")
        error = self.assertRaises(Conflict, self.cut_off)  # before anything is copied
        self.assertThat(str(error), Contains(f"{self.path} exists"))
        self.assertEqual(["new"], self.left())

    def test_what_came_meanwhile_is_left_alone(self) -> None:
        def race() -> None:
            with new_file(self.path):
                self.path.write_bytes(b"theirs")

        self.assertRaises(Conflict, race)
        self.assertEqual(b"theirs", self.path.read_bytes())

    def test_a_file_system_without_hard_links_and_files_without_names(self) -> None:
        def opened(path: Path, flags: int, *more: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no nameless files")
            return opening(path, flags, *more)

        opening = os.open
        self.patch(os, "open", opened)
        self.patch(os, "link", mock.Mock(side_effect=PermissionError(errno.EPERM, "no links")))
        self.test_what_came_meanwhile_is_left_alone()
        self.path.unlink()
        self.test_after_an_error_there_is_nothing()
        self.fill()
        self.assertEqual((["new"], b"content"), (self.left(), self.path.read_bytes()))

    def test_no_folder_is_made(self) -> None:
        self.path = self.folder / "none" / "new"
        self.assertRaises(BadRequest, self.fill)
        self.assertEqual([], self.left())

    def test_what_the_system_refuses_is_told_with_the_file(self) -> None:
        self.path = Path("/proc/new")
        error = self.assertRaises(HostTrouble, self.fill)
        self.assertThat(str(error), Contains("writing /proc/new"))
        self.assertThat(str(error), Contains(os.strerror(errno.ENOENT)))
