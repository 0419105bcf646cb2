"""What OpenNebula tells its drivers."""

from __future__ import annotations

import base64
import os
from unittest import mock

import testtools

from opennebula_tm.driver import nebula
from opennebula_tm.driver.errors import FrontendFailed
from tests.unit.opennebula_tm.scene import write
from tests.unit.virtman.scene import folder_for

VM = """<VM><ID>42</ID><LCM_STATE>3</LCM_STATE><DEPLOY_ID>one-42</DEPLOY_ID><TEMPLATE>
<DISK><DISK_ID>0</DISK_ID><SIZE>2048</SIZE><ORIGINAL_SIZE>1024</ORIGINAL_SIZE><SOURCE>/ds/100/one-7-0a1b2c3d</SOURCE>
<CLONE>YES</CLONE><DRIVER><![CDATA[raw]]></DRIVER><TM_MAD>virtman</TM_MAD><VIRTMAN_METHOD>tree</VIRTMAN_METHOD></DISK>
<DISK><DISK_ID>1</DISK_ID><SIZE>1024</SIZE><ORIGINAL_SIZE>1024</ORIGINAL_SIZE><CLONE>no</CLONE></DISK>
<DISK><DISK_ID>2</DISK_ID><SIZE>512</SIZE><TYPE>swap</TYPE></DISK>
</TEMPLATE><HISTORY_RECORDS><HISTORY><HOSTNAME>a</HOSTNAME></HISTORY><HISTORY><HOSTNAME>b</HOSTNAME></HISTORY>
</HISTORY_RECORDS></VM>"""


class VmTest(testtools.TestCase):
    def test_a_vm_has_hosts_and_disks(self) -> None:
        vm = nebula.vm_of(nebula.parse(VM, "the VM"))
        self.assertEqual((42, 3, "one-42", ("a", "b")), (vm.number, vm.state, vm.deploy_id, vm.hosts))
        self.assertEqual(("raw", "virtman"), (vm.disk(0).driver, vm.disk(0).tm_mad))
        self.assertEqual(["tree", ""], [vm.disk(number).method for number in (0, 1)])
        # A disk grows only if it is to be larger than its image.
        self.assertEqual([2048 << 20, 0, 0], [vm.disk(number).grown for number in (0, 1, 2)])
        self.assertIn("VM 42 has a disk 7", str(self.assertRaises(FrontendFailed, vm.disk, 7)))


class DecodeTest(testtools.TestCase):
    def test_a_request_is_xml_in_base64(self) -> None:
        text = base64.encodebytes("<A><B>Übung &amp; mehr\n</B></A>".encode())
        self.assertEqual("Übung & mehr", nebula.decode(text, "x").text("B"))
        for request in (b"", b"abc", base64.b64encode(b"<A>"), base64.b64encode(b"\xff\xfe")):
            self.assertRaises(FrontendFailed, nebula.decode, request, "x")


class ShowTest(testtools.TestCase):
    def test_onevm_is_asked_and_its_failure_is_not_taken_for_a_vm_without_disks(self) -> None:
        folder = folder_for(self)
        self.enterContext(mock.patch.dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}"))
        write(folder / "onevm", f'#!/bin/sh\n[ "$1 $2" = "show -x" ] && cat <<"END"\n{VM}\nEND\n', 0o755)
        self.assertEqual(("a", "b"), nebula.show_vm(42).hosts)
        self.assertRaises(FrontendFailed, nebula.show_vm, 43)  # the answer is about another VM
        write(folder / "onevm", "#!/bin/sh\necho 'no such\nVM' >&2; exit 3\n", 0o755)
        error = self.assertRaises(FrontendFailed, nebula.show_vm, 42)
        self.assertEqual("onevm show -x 42 failed: no such VM", str(error))
