"""A wave of servers by Nova: the file that stands for Glance, and what is refused before it starts."""

from __future__ import annotations

from click.testing import CliRunner
from testtools import ExpectedException, TestCase

from benchmarks import nova
from benchmarks.errors import NoRoom
from benchmarks.nova import check_room
from benchmarks.openstack.imagefile import CHUNK, ImageFile, metadata
from benchmarks.openstack.plan import Plan
from tests.unit.virtman.scene import folder_for


class ImageFileTest(TestCase):
    def test_each_download_is_the_file_and_is_counted(self) -> None:
        file, content = folder_for(self) / "image", bytes(CHUNK) + b"end"
        file.write_bytes(content)
        client = ImageFile(file)
        self.assertEqual(content, b"".join(client.call(None, 2, "data", args=("id",))))  # as Nova calls
        self.assertEqual(content, b"".join(client.call(None, "data", "id")))  # as Cinder does
        self.assertEqual((2 * len(content), 2), (client.sent, client.downloads))
        found = metadata("id", file, 1 << 30)
        self.assertEqual((len(content), 1 << 30), (found["size"], found["virtual_size"]))


class RefusalTest(TestCase):
    def test_too_little_room_is_told_in_one_line_before_anything_is_done(self) -> None:
        with ExpectedException(NoRoom, "[^\n]*60 servers of 1000000000 MiB[^\n]*--data"):
            check_room(Plan(60, 4, 2048, 10**9, 4), folder_for(self))

    def test_data_must_fit_and_the_size_be_whole_gib(self) -> None:
        for option, value in (("--data", "17"), ("--data", "4096"), ("--size", "1500")):
            result = CliRunner().invoke(nova.main, [option, value])
            self.assertEqual(2, result.exit_code)
            self.assertIn(f"{option} must be", result.output)
