"""System datastores: OpenNebula's ssh driver does the work, and disks of ours are not lost."""

from __future__ import annotations

import base64

from testtools import TestCase

from opennebula_tm.driver import nebula
from opennebula_tm.driver.errors import Refused
from opennebula_tm.driver.system import SystemDatastore, is_systems, silent_hosts
from tests.unit.opennebula_tm.scene import write
from tests.unit.virtman.scene import folder_for

CALL = ("host-1", "host-2", "/ds/0/42", "42", "0")


def request(*drivers: str) -> bytes:
    """A VM that has a disk of each of these drivers."""
    disks = "".join(f"<DISK><DISK_ID>{n}</DISK_ID><TM_MAD>{name}</TM_MAD></DISK>" for n, name in enumerate(drivers))
    return base64.b64encode(f"<VM><ID>42</ID><TEMPLATE>{disks}</TEMPLATE></VM>".encode())


class SystemDatastoreTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.system = SystemDatastore(self.folder)
        self.script("premigrate", f'echo "$*" >{self.folder}/ran; cat >>{self.folder}/ran; exit 7')
        self.script("postmigrate", f'echo "$*" >{self.folder}/ran; exit 7')

    def script(self, name: str, body: str) -> None:
        """One of OpenNebula's ssh driver."""
        write(self.folder / "ssh" / name, f"#!/bin/sh\n{body}\n", 0o755)

    def ran(self) -> str | None:
        """What it was called with since the last call."""
        note = self.folder / "ran"
        text = note.read_text() if note.exists() else None
        note.unlink(missing_ok=True)
        return text

    def test_no_live_migration_leaves_a_disk_of_ours_behind(self) -> None:
        error = self.assertRaises(Refused, self.system.premigrate, CALL, request("ssh", "virtman", "virtman"))
        self.assertIn("only host-1 has the data of its disks 1, 2;", str(error))
        self.assertIsNone(self.ran())

    def test_other_live_migrations_are_those_of_opennebula(self) -> None:
        at_home = ("host-1", "host-1", *CALL[2:])
        for call, told in ((CALL, request("ssh")), (at_home, request("virtman"))):
            end = self.assertRaises(SystemExit, self.system.premigrate, call, told)
            self.assertEqual((7, f"{' '.join(call)}\n{told.decode()}"), (end.code, self.ran()))

    def test_on_behalf_of_another_system_datastore_nothing_is_done(self) -> None:
        self.system.premigrate((*CALL, "ssh"), request("virtman"))
        self.system.after_migration("postmigrate", (*CALL, "ssh"))
        self.assertIsNone(self.ran())
        self.assertRaises(SystemExit, self.system.after_migration, "postmigrate", CALL)
        self.assertEqual(f"{' '.join(CALL)}\n", self.ran())

    def test_who_is_to_report_a_datastore(self) -> None:
        store = nebula.parse("<DATASTORE><ID>7</ID><CLUSTERS><ID>0</ID></CLUSTERS></DATASTORE>", "")

        def host(state: int = 2, cluster: int = 0, virtman: str = "YES", reported: int = 6) -> nebula.Element:
            share = f"<HOST_SHARE><DATASTORES><DS><ID>{reported}</ID></DS></DATASTORES></HOST_SHARE>"
            words = f"<NAME>h</NAME><STATE>{state}</STATE><CLUSTER_ID>{cluster}</CLUSTER_ID>{share}"
            return nebula.parse(f"<HOST>{words}<TEMPLATE><VIRTMAN>{virtman}</VIRTMAN></TEMPLATE></HOST>", "")

        others = [host(state=3), host(cluster=1), host(virtman="NO"), host(reported=7)]
        self.assertEqual(["h"], silent_hosts(store, [*others, host()]))

    def test_folders_and_volatile_disks_are_the_system_datastores(self) -> None:
        for line, systems in (
            ("h:/ds/0/42 42 0", True), ("h:/ds/0/42/ 42 100", True), ("h:/ds/0/42/disk.1 42 0", True),
            ("h:/ds/0/42/disk.1 g:/ds/105/42/disk.1 42 105", True), ("h:/ds/0/42/disk.1 9 42 0", True),
            ("h:/ds/0/42/disk.1 g:/ds/105/42/disk.1 42 100", False), ("h:/ds/7/0/disk.1 42 0", False),
            ("nonsense 0", False),
        ):  # fmt: skip
            self.assertEqual(systems, is_systems(line.split()), line)
