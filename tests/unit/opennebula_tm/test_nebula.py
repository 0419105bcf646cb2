"""What OpenNebula tells its drivers."""

from __future__ import annotations

import base64
import os
import tempfile
from pathlib import Path

import testtools

from opennebula_tm.driver import nebula
from opennebula_tm.driver.errors import FrontendFailed

VM = """<VM><ID>42</ID><LCM_STATE>3</LCM_STATE><DEPLOY_ID>one-42</DEPLOY_ID><TEMPLATE>
<DISK><DISK_ID>0</DISK_ID><SIZE>2048</SIZE><ORIGINAL_SIZE>1024</ORIGINAL_SIZE><SOURCE>/ds/100/one-7-0a1b2c3d</SOURCE>
<CLONE>YES</CLONE><DRIVER><![CDATA[raw]]></DRIVER><TM_MAD>virtman</TM_MAD></DISK>
<DISK><DISK_ID>1</DISK_ID><SIZE>1024</SIZE><ORIGINAL_SIZE>1024</ORIGINAL_SIZE><CLONE>no</CLONE></DISK>
<DISK><DISK_ID>2</DISK_ID><SIZE>512</SIZE><TYPE>swap</TYPE></DISK>
</TEMPLATE><HISTORY_RECORDS><HISTORY><HOSTNAME>a</HOSTNAME></HISTORY><HISTORY><HOSTNAME>b</HOSTNAME></HISTORY>
</HISTORY_RECORDS></VM>"""


class VmTest(testtools.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.vm = nebula.vm_of(nebula.parse(VM, "the VM"))

    def test_a_vm_has_hosts_and_disks(self) -> None:
        self.assertEqual(
            (42, 3, "one-42", ("a", "b")), (self.vm.number, self.vm.state, self.vm.deploy_id, self.vm.hosts)
        )
        disk = self.vm.disk(0)
        self.assertEqual(("raw", "virtman"), (disk.driver, disk.tm_mad))

    def test_a_disk_grows_only_if_it_is_to_be_larger_than_its_image(self) -> None:
        self.assertEqual([2048 << 20, 0, 0], [self.vm.disk(number).grown for number in (0, 1, 2)])

    def test_a_disk_that_it_does_not_have_is_told(self) -> None:
        error = self.assertRaises(FrontendFailed, self.vm.disk, 7)
        self.assertIn("VM 42 has a disk 7", str(error))


class DecodeTest(testtools.TestCase):
    def test_a_request_is_xml_in_base64(self) -> None:
        text = base64.encodebytes("<A><B>Übung &amp; mehr\n</B></A>".encode())
        self.assertEqual("Übung & mehr", nebula.decode(text, "x").text("B"))

    def test_what_is_neither_is_told(self) -> None:
        for request in (b"", b"abc", base64.b64encode(b"<A>"), base64.b64encode(b"\xff\xfe")):
            with self.subTest(request=request):
                self.assertRaises(FrontendFailed, nebula.decode, request, "x")


class ShowTest(testtools.TestCase):
    """With a program called ``onevm`` first in the path."""

    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        before = os.environ["PATH"]
        self.addCleanup(os.environ.__setitem__, "PATH", before)
        os.environ["PATH"] = f"{folder.name}:{before}"

    def onevm(self, script: str) -> None:
        program = self.folder / "onevm"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def test_it_asks_onevm(self) -> None:
        self.onevm(f'[ "$*" = "show -x 42" ] && cat <<"END"\n{VM}\nEND')
        self.assertEqual(("a", "b"), nebula.show_vm(42).hosts)

    def test_one_that_fails_is_told_and_not_taken_for_a_vm_without_disks(self) -> None:
        self.onevm("echo 'no such\nVM' >&2; exit 3")
        error = self.assertRaises(FrontendFailed, nebula.show_vm, 42)
        self.assertEqual("onevm show -x 42 failed: no such VM", str(error))

    def test_an_answer_about_another_vm_is_refused(self) -> None:
        self.onevm(f'cat <<"END"\n{VM}\nEND')
        self.assertRaises(FrontendFailed, nebula.show_vm, 43)
