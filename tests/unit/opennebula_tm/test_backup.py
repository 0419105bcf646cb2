"""Backups: what is asked of hosts, and what of OpenNebula's own scripts."""

from __future__ import annotations

import base64
import os
from unittest import mock

from opennebula_tm.driver.backup import Backups
from opennebula_tm.driver.errors import FrontendFailed, HostFailed, Refused
from opennebula_tm.driver.settings import Settings
from tests.unit.opennebula_tm.scene import write
from tests.unit.opennebula_tm.steps import StepsTestCase, vm_on


def request(drivers: str = "virtman,virtman", increment: str = "-1") -> bytes:
    """A VM with a disk of each of these drivers."""
    disks = "".join(
        f"<DISK><DISK_ID>{n}</DISK_ID><TM_MAD>{name}</TM_MAD></DISK>" for n, name in enumerate(drivers.split(","))
    )
    config = f"<BACKUP_CONFIG><LAST_INCREMENT_ID>{increment}</LAST_INCREMENT_ID></BACKUP_CONFIG>"
    return f"<VM><ID>42</ID><TEMPLATE>{disks}</TEMPLATE><BACKUPS>{config}</BACKUPS></VM>".encode()


class BackupsTestCase(StepsTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.remotes = self.folder / "remotes"
        self.home = self.at("host-1", disk=None)
        self.backups = self.of("virtman,virtman")

    def of(self, drivers: str) -> Backups:
        """Of a VM that has a disk of each of these drivers."""
        return Backups(Settings(), self.remotes, vm_on("host-1", tm_mad=drivers))


class BackupTest(BackupsTestCase):
    def test_the_vm_and_its_disks_are_written_to_its_folder(self) -> None:
        self.backups.prebackup(self.home, "0:1:", "42", request())
        made = f"{self.datastores}/0/42/backup"
        lock = f"{self.datastores}/.virtman"
        self.assertEqual(
            [
                ["host-1", "backup-begin", made],
                ["host-1", "backup", lock, "42-0", "one-42-0-host-1", f"{made}/disk.0.0"],
                ["host-1", "backup", lock, "42-1", "one-42-1-host-1", f"{made}/disk.1.0"],
            ],
            self.steps(),
        )
        self.assertEqual(request(), base64.b64decode((self.folder / "input").read_text()))
        self.backups.postbackup(self.home, "42")
        self.assertEqual([["host-1", "backup-end", made]], self.steps())

    def test_only_whole_backups_of_our_own_disks_are_made(self) -> None:
        for told, why in ((request(increment="0"), "FULL"), (request("virtman,ssh"), "its disks 1 are not")):
            error = self.assertRaises(Refused, self.backups.prebackup, self.home, "0:1", "42", told)
            self.assertIn(why, str(error))
        self.assertEqual([], self.steps())
        self.backups.prebackup(self.home, "0", "42", request("virtman,ssh"))
        self.assertEqual(["host-1 backup-begin", "host-1 backup"], self.done())

    def test_a_disk_of_the_vm_is_no_folder_for_backups(self) -> None:
        self.assertRaises(Refused, self.backups.postbackup, self.at("host-1"), "42")
        self.assertEqual([], self.steps())

    def test_backups_are_where_opennebula_is_told_to_keep_them(self) -> None:
        own = f"{self.datastores}/0/42/backup"
        for text, made in (
            ("BACKUP_BASE_PATH=/b", "/b/42/backup"), ("export BACKUP_BASE_PATH='/b c'\n", "/b c/42/backup"),
            ('A=1\n  BACKUP_BASE_PATH = "/b"', "/b/42/backup"), ("# BACKUP_BASE_PATH=/b", own),
            ("BACKUP_BASE_PATH=", own), ("BACKUP_BASE_PATH=relative", own), ("MY_BACKUP_BASE_PATH=/b", own),
        ):  # fmt: skip
            write(self.remotes / "etc/datastore/datastore.conf", text)
            self.backups.postbackup(self.home, "42")
            self.assertEqual([["host-1", "backup-end", made]], self.steps(), text)


class RestoreTest(BackupsTestCase):
    """With programs of OpenNebula's names, and a backup of the disks 0 and 1."""

    def setUp(self) -> None:
        super().setUp()
        self.program("bin/oneimage", "echo '<IMAGE><DATASTORE_ID>200</DATASTORE_ID></IMAGE>'")
        self.program("bin/onedatastore", "echo '<DATASTORE><DS_MAD>Vault</DS_MAD></DATASTORE>'")
        self.program("bin/onevm", "echo '<VM><ID>42</ID></VM>'")
        self.program("remotes/datastore/vault/ls", """cat >/dev/null; echo '{"0": "url:0", "1": "url:1"}'""")
        self.program("remotes/datastore/downloader.sh", 'printf %s "$*"')
        self.enterContext(mock.patch.dict(os.environ, PATH=f"{self.folder}/bin:{os.environ['PATH']}"))
        self.has("host-1", snapshot="snap-3")

    def program(self, path: str, script: str) -> None:
        write(self.folder / path, f"#!/bin/sh\n{script}\n", 0o755)

    def restore(self, disk: str, backups: Backups | None = None) -> None:
        (backups or self.backups).restore(self.home, "42", "50", "0", disk)

    def test_a_disk_gets_what_the_backup_holds_and_its_snapshots_go(self) -> None:
        self.assertIn("no disk 7 of VM 42", str(self.assertRaises(Refused, self.restore, "7")))
        self.restore("1")
        link = f"{self.datastores}/0/42/disk.1"
        self.assertEqual(
            ["host-1", "restore", f"{self.datastores}/.virtman", "42-1", link, "one-42-1-host-1", "snap-3"],
            self.steps()[-1],
        )
        self.assertEqual("--nodecomp url:1 -", (self.folder / "input").read_text())

    def test_before_any_disk_is_touched_all_are_looked_at(self) -> None:
        self.assertRaises(Refused, self.restore, "-1", self.of("virtman,ssh"))
        self.assertEqual([], self.steps())

    def test_what_could_not_be_fetched_is_the_reason_for_what_the_host_says(self) -> None:
        self.says("host-1", "restore", "what came is no whole backup", fails=True)
        self.assertIn("no whole backup", str(self.assertRaises(HostFailed, self.restore, "0")))
        self.program("remotes/datastore/downloader.sh", "echo 'no such\nfile' >&2; exit 1")
        error = self.assertRaises(FrontendFailed, self.restore, "0")
        self.assertEqual("cannot fetch disk 0 of the backup: no such file", str(error))
