"""Which block device it is, as the kernel tells."""

from __future__ import annotations

import os
from pathlib import Path

from testtools import TestCase

from drivers.host import blockdev
from tests.unit.virtman.scene import folder_for

BOOT = "f0a5c7d2"


class IdentityTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.sys = folder_for(self)
        self.boot = self.sys / "boot_id"
        self.boot.write_text(f"{BOOT}\n")

    def device(self, number: str, **files: str | bytes) -> Path:
        """A device as sysfs has it. A file's name has two ``_`` where there is a folder."""
        folder = self.sys / "devices" / f"disk-{number}"
        folder.mkdir(parents=True)
        link = self.sys / "dev/block" / number
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        for name, said in {"dev": number, **files}.items():
            file = folder / name.replace("__", "/")
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(said if isinstance(said, bytes) else f"{said}\n".encode())
        return folder

    def identity(self, major: int, minor: int) -> str:
        return blockdev.identity(os.makedev(major, minor), self.sys, self.boot)

    def test_lasting_names(self) -> None:
        known: list[tuple[int, dict[str, str | bytes], str]] = [
            (253, {"dm__uuid": "LVM-abc", "diskseq": "7"}, "dm/uuid LVM-abc"),
            (259, {"wwid": "eui.0025"}, "wwid eui.0025"),
            (8, {"device__wwid": "naa.6001405", "diskseq": "3"}, "device/wwid naa.6001405"),
            (65, {"device__vpd_pg83": b"\x00\x83\x00\x14\xff", "diskseq": "4"}, "device/vpd_pg83 00830014ff"),
            (254, {"serial": b"vol-1\0\0"}, "serial vol-1"),
            (179, {"device__serial": "0x1f"}, "device/serial 0x1f"),
            (252, {"serial": b"\x01a"}, "serial 0161"),
        ]
        for major, files, identity in known:
            self.device(f"{major}:0", **files)
            self.assertEqual(identity, self.identity(major, 0))

    def test_a_lasting_name_is_the_same_under_another_number(self) -> None:
        self.device("8:0", device__wwid="naa.6001405", diskseq="3")
        self.device("8:32", device__wwid="naa.6001405", diskseq="9")
        self.assertEqual(self.identity(8, 0), self.identity(8, 32))
        instances = {blockdev.instance(os.makedev(8, minor), self.sys) for minor in (0, 32)}
        self.assertEqual(2, len(instances), "who has the old one open does not read the new one")

    def test_one_that_went_and_came_back_as_the_same_is_another_instance(self) -> None:
        disk = self.device("8:0", device__wwid="naa.6001405", diskseq="3")
        part = disk / "part1"
        part.mkdir()
        (part / "partition").write_text("1\n")
        (self.sys / "dev/block/8:1").symlink_to(part)
        found = set()
        for diskseq in ("3", "4"):
            (disk / "diskseq").write_text(f"{diskseq}\n")
            found |= {blockdev.instance(os.makedev(8, minor), self.sys) for minor in (0, 1)}
        self.assertEqual(4, len(found))

    def test_without_a_name_it_is_the_number_until_the_boot_and_until_another_one_has_it(self) -> None:
        folder = self.device("7:0", diskseq="26")
        first = self.identity(7, 0)
        self.assertEqual(f"boot {BOOT} 7:0 26", first)
        (folder / "diskseq").write_text("27\n")
        second = self.identity(7, 0)
        self.boot.write_text("other\n")
        self.assertEqual(3, len({first, second, self.identity(7, 0)}))
        self.assertTrue(blockdev.is_numbered_like(first, second))
        self.assertFalse(blockdev.is_numbered_like(first, self.identity(7, 0)))

    def test_names_that_are_empty_are_none(self) -> None:
        self.device("253:2", dm__uuid="", serial="", diskseq="5")
        self.assertEqual(f"boot {BOOT} 253:2 5", self.identity(253, 2))

    def test_lasting_names_are_alike_only_if_they_are_the_same(self) -> None:
        self.assertTrue(blockdev.is_numbered_like("serial 1", "serial 1"))
        self.assertFalse(blockdev.is_numbered_like("serial one two 1", "serial one two 2"))

    def test_a_partition_is_known_by_its_disk_and_its_place(self) -> None:
        disk = self.device("8:0", device__wwid="naa.6001405", diskseq="3")
        for number in (1, 2):
            part = disk / f"sda{number}"
            part.mkdir()
            (self.sys / "dev/block" / f"8:{number}").symlink_to(part)
            for name, said in (("dev", f"8:{number}"), ("partition", str(number)), ("start", str(2048 * number))):
                (part / name).write_text(f"{said}\n")
        self.assertEqual("device/wwid naa.6001405 partition 1 from 2048", self.identity(8, 1))
        self.assertNotEqual(self.identity(8, 1), self.identity(8, 2))
        self.assertEqual("8:1 3", blockdev.instance(os.makedev(8, 1), self.sys), "it goes and comes with its disk")

    def test_where_it_is_now(self) -> None:
        self.device("8:0", device__wwid="naa.1", uevent="MAJOR=8\nDEVNAME=sda\nDEVTYPE=disk")
        self.device("8:16", device__wwid="naa.2", uevent="MAJOR=8\nDEVNAME=sdb\nDEVTYPE=disk")
        self.device("7:0", diskseq="27", uevent="DEVNAME=loop0")
        (self.sys / "dev/block/8:32").symlink_to(self.sys / "devices/gone")
        self.assertEqual([Path("/dev/sdb")], self.nodes("device/wwid naa.2"))
        self.assertEqual([Path("/dev/loop0")], self.nodes(f"boot {BOOT} 7:0 26"))
        self.assertEqual([], self.nodes("device/wwid naa.3") + self.nodes("boot other 7:0 27"))

    def nodes(self, wanted: str) -> list[Path]:
        return [*blockdev.nodes(wanted, self.sys, self.boot)]

    def test_one_that_is_gone(self) -> None:
        self.assertRaises(FileNotFoundError, self.identity, 8, 0)
