"""Headers of qcow2 files."""

from __future__ import annotations

import struct

import testtools
from hypothesis import given
from hypothesis import strategies as st

from drivers.errors import BadDisk
from drivers.qemu.qcow2file import Header, is_empty, read_header
from tests.unit.virtman.scene import folder_for


def header(*, version: int = 3, size: int = 1 << 30, backing: bytes = b"", features: int = 0) -> bytes:
    at = 104 if backing else 0
    head = struct.pack(">4sIQIIQ", b"QFI\xfb", version, at, len(backing), 16, size)
    return head.ljust(72, b"\0") + struct.pack(">Q", features) + bytes(24) + backing


class HeaderTest(testtools.TestCase):
    def setUp(self) -> None:
        super().setUp()
        folder = folder_for(self)
        self.path = folder / "disk"

    def read(self, content: bytes) -> Header:
        self.path.write_bytes(content)
        return read_header(self.path)

    def test_size_backing_name_and_features(self) -> None:
        self.assertEqual(Header(1 << 30, None, False, False, False, 0, 0, 0), self.read(header()))
        self.assertEqual("json:{}", self.read(header(backing=b"json:{}")).backing)
        self.assertTrue(self.read(header(features=1)).dirty)
        self.assertTrue(self.read(header(features=2)).corrupt)
        self.assertTrue(self.read(header(features=4)).external_data)

    def test_other_files_are_refused(self) -> None:
        for content in (b"", b"QFI\xfb", header()[:79], b"x" * 200, header(version=2), header(backing=b"x" * 1024)):
            self.assertRaises(BadDisk, self.read, content)

    @given(st.binary(max_size=300))
    def test_garbage_is_refused_or_read_but_nothing_else(self, content: bytes) -> None:
        for garbage in (content, header()[:4] + content):
            try:
                self.read(garbage)
            except BadDisk:
                continue

    def test_missing_file_is_told(self) -> None:
        self.assertRaises(FileNotFoundError, read_header, self.path)

    def test_it_is_empty_while_its_first_table_is(self) -> None:
        head = bytearray(header().ljust(512, b"\0"))
        head[36:48] = struct.pack(">IQ", 2, 512)
        for table, empty in ((bytes(16), True), (bytes(8) + b"\x80" + bytes(7), False), (b"\1" + bytes(15), False)):
            self.path.write_bytes(head + table + b"more")
            self.assertEqual(empty, is_empty(self.path))
