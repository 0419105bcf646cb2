"""An image source of three layers. What the agent asks of it: tests/unit/virtman/test_stacks.py."""

from __future__ import annotations

import os
from unittest import mock

from testtools import TestCase

from drivers.base import Child, Device, Image, Range
from drivers.errors import DriverError
from drivers.layered import PIECE, LayeredSource
from tests.doubles.drivers import ExportDouble, Host
from tests.unit.virtman.scene import folder_for

OLD, NEW = [Child("old")], [Child("new")]
IMAGE = Image("debian", 4 * PIECE, "sha256:00")


class FillTest(TestCase):
    def test_the_ranges_are_read_as_children_would_and_nothing_else_is(self) -> None:
        disk = folder_for(self) / "disk"
        disk.write_bytes(bytes(IMAGE.size))
        export = mock.Mock()
        export.local.return_value = Device(IMAGE.size, disk)
        read: list[tuple[int, int]] = []

        def pread(fd: int, length: int, offset: int) -> bytes:
            read.append((offset, length))
            return real(fd, length, offset)

        real = os.pread
        self.patch(os, "pread", pread)
        LayeredSource(mock.Mock(), mock.Mock(), export).fill(IMAGE, [Range(0, 512), Range(PIECE, PIECE + 512)])
        self.assertEqual([(0, 512), (PIECE, PIECE), (2 * PIECE, 512)], read)


class AdmissionTest(TestCase):
    """Who is let in, by words of Volt that come in any order."""

    def setUp(self) -> None:
        super().setUp()
        self.host = Host()
        self.source = LayeredSource(mock.Mock(), mock.Mock(), ExportDouble(self.host, died=lambda _image: None))

    def assert_in(self, children: list[Child]) -> None:
        self.assertEqual(children, self.host.allowed.get("image", []))

    def test_children_of_an_open_image_change_with_the_assignment(self) -> None:
        self.source.admit("image", 1, OLD, new=True)
        self.assert_in(OLD)
        self.source.admit("image", 2, NEW)
        self.assert_in(NEW)

    def test_an_image_without_an_endpoint_gets_none(self) -> None:
        self.source.admit("image", 2, NEW)
        self.assert_in([])

    def test_an_older_assignment_sends_nobody_away(self) -> None:
        self.source.admit("image", 1, OLD, new=True)
        self.source.admit("image", 3, NEW)
        self.source.admit("image", 2, OLD)
        self.source.admit("image", 1, OLD, new=True)
        self.assert_in(NEW)

    def test_after_it_was_closed_any_assignment_counts(self) -> None:
        self.source.admit("image", 3, OLD, new=True)
        self.source.close("image")
        self.source.admit("image", 4, NEW)
        self.assert_in(OLD)
        self.source.admit("image", 1, NEW, new=True)
        self.assert_in(NEW)

    def test_what_was_removed_is_closed_and_what_is_built_again_lets_the_same_in(self) -> None:
        self.source.admit("image", 1, OLD, new=True)
        self.host.allowed.clear()
        self.source.admit("image", 1, OLD, new=True)
        self.assert_in(OLD)
        self.source.drop("image", None)
        self.source.admit("image", 2, NEW)
        self.assert_in([])

    def test_an_assignment_that_failed_counts_when_it_comes_again(self) -> None:
        self.source.admit("image", 1, OLD, new=True)
        self.host.failing = {"export.allow": DriverError("stuck")}
        self.assertRaises(DriverError, self.source.admit, "image", 2, NEW)
        self.host.failing = {}
        self.source.admit("image", 2, NEW)
        self.assert_in(NEW)
