"""Names of OpenNebula's things in VirtMan, and places of disks."""

from __future__ import annotations

from pathlib import PurePosixPath

from testtools import TestCase

from opennebula_tm.driver import names
from opennebula_tm.driver.errors import Refused
from virtman.names import check_name

LONG = "a-host-with-a-very-long-name-indeed." * 3 + "example.com"
VM = "node1:/var/lib/one/datastores/0/42"


class NamesTest(TestCase):
    def test_a_disk_is_named_after_vm_number_and_host_by_a_name_that_virtman_takes(self) -> None:
        self.assertEqual("one-42-0-node1_example_com", names.disk(42, 0, "node1.example.com"))
        for host in ("n", "node1.example.com", "192.0.2.17", LONG, "x" * 253):
            name = names.disk(4294967295, 99999, host)
            self.assertEqual(name, check_name("vm", name))
        self.assertNotEqual(names.disk(1, 0, LONG + "1"), names.disk(1, 0, LONG + "2"))

    def test_a_disk_has_a_host_a_number_and_a_folder(self) -> None:
        place = names.place("node1:/var/lib/one//datastores/0/42/disk.7")
        self.assertEqual(("node1", 7, 0), (place.host, place.disk, place.datastore))
        self.assertEqual(PurePosixPath("/var/lib/one/datastores/0/42"), place.folder)
        self.assertEqual(PurePosixPath("/var/lib/one/datastores/0/.virtman"), place.ours)
        self.assertEqual(place.locks, names.place("node1:/var/lib/one/datastores/105/42/disk.0").locks)

    def test_what_is_beside_a_disk_is_no_disk(self) -> None:
        """OpenNebula's drivers of files have snapshots and backups there."""
        for name in ("", "kernel", "disk.0.snap", "disk.0.0", "disk.0.new", "disk.", "disk.x", "xdisk.0"):
            self.assertIsNone(names.place(f"{VM}/{name}").disk, name)
        self.assertEqual(names.place(f"{VM}/").path, names.place(f"{VM}/").folder)

    def test_what_is_no_place_of_a_vm_is_refused(self) -> None:
        for argument in (
            "/var/lib/one/datastores/0/42/disk.0", "node1:/", "node1:/etc/disk.0", "node1:relative/0/42/disk.0",
            "node1:/var/lib/one/datastores/0/../42/disk.0", "-oProxyCommand=x:/ds/0/42/disk.0", "a b:/ds/0/42/disk.0",
            "node1:/var/lib/one/datastores/0/42/disk.0/more/x", "node1:/a:b/0/42/disk.0", "node1:/a\nb/0/42/disk.0",
        ):  # fmt: skip
            self.assertRaises(Refused, names.place, argument)

    def test_a_source_may_come_with_a_host_or_without(self) -> None:
        for argument in ("fe:/ds/100/one-7-0a1b2c3d", "/ds/100/one-7-0a1b2c3d", "fe://ds//100/one-7-0a1b2c3d"):
            self.assertEqual(PurePosixPath("/ds/100/one-7-0a1b2c3d"), names.path_of(argument))

    def test_numbers_are_read_and_nothing_else(self) -> None:
        self.assertEqual((-1, 12), (names.number("x", "-1"), names.number("x", "12")))
        for text in ("", "1 2", "1;reboot", "-2", "0x1", "1" * 16):
            self.assertRaises(Refused, names.number, "x", text)
