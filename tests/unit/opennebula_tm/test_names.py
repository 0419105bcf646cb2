"""Names of OpenNebula's things in VirtMan, and places of disks."""

from __future__ import annotations

from pathlib import PurePosixPath

import testtools

from opennebula_tm.driver import names
from opennebula_tm.driver.errors import Refused
from virtman.names import check_name

LONG = "a-host-with-a-very-long-name-indeed." * 3 + "example.com"


class DiskNameTest(testtools.TestCase):
    def test_a_disk_is_named_after_vm_number_and_host(self) -> None:
        self.assertEqual("one-42-0-node1_example_com", names.disk(42, 0, "node1.example.com"))

    def test_every_name_is_one_that_virtman_takes(self) -> None:
        for host in ("n", "node1.example.com", "192.0.2.17", LONG, "x" * 253):
            with self.subTest(host=host):
                name = names.disk(4294967295, 99999, host)
                self.assertEqual(name, check_name("vm", name))

    def test_long_names_of_hosts_that_begin_alike_differ(self) -> None:
        self.assertNotEqual(names.disk(1, 0, LONG + "1"), names.disk(1, 0, LONG + "2"))


class PlaceTest(testtools.TestCase):
    def test_a_disk_has_a_host_a_number_and_a_folder(self) -> None:
        place = names.place("node1:/var/lib/one//datastores/0/42/disk.7")
        self.assertEqual(("node1", 7, 0), (place.host, place.disk, place.datastore))
        self.assertEqual(PurePosixPath("/var/lib/one/datastores/0/42"), place.folder)
        self.assertEqual(PurePosixPath("/var/lib/one/datastores/0/.virtman"), place.ours)

    def test_one_lock_holds_for_all_system_datastores_of_a_host(self) -> None:
        folders = {names.place(f"node1:/var/lib/one/datastores/{number}/42/disk.0").locks for number in (0, 105)}
        self.assertEqual({PurePosixPath("/var/lib/one/datastores/.virtman")}, folders)

    def test_a_folder_of_a_vm_is_no_disk(self) -> None:
        place = names.place("node1:/var/lib/one/datastores/0/42/")
        self.assertIsNone(place.disk)
        self.assertEqual(place.path, place.folder)

    def test_a_kernel_in_a_vms_folder_is_no_disk(self) -> None:
        self.assertIsNone(names.place("node1:/var/lib/one/datastores/0/42/kernel").disk)

    def test_what_is_beside_a_disk_is_no_disk(self) -> None:
        """OpenNebula's drivers of files have snapshots and backups there."""
        for name in ("disk.0.snap", "disk.0.0", "disk.0.new", "disk.", "disk.x", "xdisk.0"):
            self.assertIsNone(names.place(f"node1:/var/lib/one/datastores/0/42/{name}").disk, name)

    def test_what_is_no_place_of_a_vm_is_refused(self) -> None:
        for argument in (
            "/var/lib/one/datastores/0/42/disk.0", "node1:/", "node1:/etc/disk.0", "node1:relative/0/42/disk.0",
            "node1:/var/lib/one/datastores/0/../42/disk.0", "-oProxyCommand=x:/ds/0/42/disk.0", "a b:/ds/0/42/disk.0",
            "node1:/var/lib/one/datastores/0/42/disk.0/more/x", "node1:/a:b/0/42/disk.0", "node1:/a\nb/0/42/disk.0",
        ):  # fmt: skip
            with self.subTest(argument=argument):
                self.assertRaises(Refused, names.place, argument)

    def test_a_source_may_come_with_a_host_or_without(self) -> None:
        for argument in ("fe:/ds/100/one-7-0a1b2c3d", "/ds/100/one-7-0a1b2c3d", "fe://ds//100/one-7-0a1b2c3d"):
            self.assertEqual(PurePosixPath("/ds/100/one-7-0a1b2c3d"), names.path_of(argument))

    def test_numbers_are_read_and_nothing_else(self) -> None:
        self.assertEqual((-1, 12), (names.number("x", "-1"), names.number("x", "12")))
        for text in ("", "1 2", "1;reboot", "-2", "0x1", "1" * 16):
            with self.subTest(text=text):
                self.assertRaises(Refused, names.number, "x", text)
