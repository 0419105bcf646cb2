"""Members of the agent's group use the disks that it makes, by QEMU programs of their own, and nobody else does."""

from __future__ import annotations

import grp
import subprocess
from pathlib import Path

from tests.others import GROUP, NOBODY, as_nobody
from tests.userspace.test_cluster import ClusterTestCase

MIB = 1 << 20


class GroupTest(ClusterTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder.chmod(0o711)
        self.gid = grp.getgrnam(GROUP).gr_gid
        self.h1 = self.host("h1")
        self.h1.group = GROUP
        self.root = self.h1.start()
        self.root.vms()

    def io(self, vm: str, command: str, *groups: int) -> str:
        """What QEMU says to who is in these groups and opens a VM's disk for writing, or why it does not."""
        argv = ["qemu-io", "-f", "qcow2", "-c", command, self.root.vm(vm).disk.path]

        def run() -> str:
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            return done.stdout + done.stderr

        return as_nobody(self, run, groups)

    def place(self) -> Path:
        """A folder in which everybody may make files."""
        folder = self.folder / "place"
        folder.mkdir()
        folder.chmod(0o777)
        return folder

    def check_used(self, vm: str) -> None:
        """A member reads the image's part of a disk, through the export, and writes to it."""
        self.assertIn(f"read {MIB}/{MIB} bytes", self.io(vm, f"read {7 * MIB} {MIB}", self.gid))
        self.assertIn(f"wrote {MIB}/{MIB} bytes", self.io(vm, f"write -P 0x77 {2 * MIB} {MIB}", self.gid))

    def test_members_use_disks_whatever_becomes_of_them(self) -> None:
        self.assertEqual("vm", self.member(self.h1, lambda client: client.create("vm", "img").name))
        self.check_used("vm")
        self.assertIn("Permission denied", self.io("vm", "read 0 512"))
        for name in ("one", "two"):
            self.member(self.h1, lambda client, name=name: client.take_snapshot("vm", name))  # type: ignore[misc]
            self.check_used("vm")
        self.member(self.h1, lambda client: client.revert("vm", "one"))
        self.check_used("vm")
        self.member(self.h1, lambda client: client.resize("vm", 16 * MIB))
        self.check_used("vm")
        self.member(self.h1, lambda client: client.clone("vm", ["clone"]))
        self.member(self.h1, lambda client: client.rename("vm", "renamed"))
        self.member(self.h1, lambda client: client.delete_snapshot("renamed", "two"))
        for vm in ("clone", "renamed"):
            self.check_used(vm)
        self.h1.stop()
        self.root = self.h1.start()
        self.check_used("clone")

    def test_clones_of_a_disk_from_before_there_was_a_group(self) -> None:
        self.h1.stop()
        self.h1.group = ""
        self.root = self.h1.start()
        self.root.create("old", "img")
        self.h1.stop()
        self.h1.group = GROUP
        self.root = self.h1.start()
        self.assertIn("Permission denied", self.io("old", "read 0 512", self.gid))
        self.assertNotIn("Error", self.member(self.h1, lambda client: client.clone("old", ["new"])))
        self.check_used("new")

    def test_a_member_exports_to_a_file_of_its_own_and_publishes_it(self) -> None:
        place = self.place()
        self.member(self.h1, lambda client: client.create("vm", "img"))
        for image_format in ("raw", "qcow2"):
            file = place / f"file.{image_format}"
            said = self.member(self.h1, lambda client, file=file: client.export_vm("vm", file, file.suffix[1:]).file)  # type: ignore[misc]
            self.assertEqual(str(file), said)
            found = file.stat()
            self.assertEqual((NOBODY, 0o600), (found.st_uid, found.st_mode & 0o777))
            argv = ["qemu-img", "compare", "-f", image_format, "-F", "raw", str(file), str(self.file)]
            subprocess.run(argv, check=True, capture_output=True)
            said = self.member(self.h1, lambda client, file=file: client.publish(file.suffix[1:], file).digest)  # type: ignore[misc]
            self.assertEqual(self.root.images()[0].digest, said)
        said = self.member(self.h1, lambda client: client.export_vm("none", place / "file"))
        self.assertEqual("UnknownVm: vm 'none' is not on this host", said)
        self.assertEqual({"file.raw", "file.qcow2"}, {path.name for path in place.iterdir()})
