"""The edits of settings files, and their way back."""

from __future__ import annotations

from testtools import TestCase

from opennebula_tm.installer import registration, settings
from opennebula_tm.installer.errors import Refused
from opennebula_tm.installer.template import attributes
from tests.unit.opennebula_tm.scene import EXECRC, ONED

FORMS = {
    "as it is": ONED,
    "CRLF": ONED.replace("\n", "\r\n"),
    "no final newline": ONED.rstrip("\n"),
    "blanks at the ends of lines": ONED.replace("\n", " \t\n"),
    "a block at the end": ONED.replace('TM_MAD_CONF_X = "no such thing"\n', "DS_MAD_CONF = [ NAME = x ]"),
    "a comment at the end": ONED.replace('TM_MAD_CONF_X = "no such thing"\n', "DS_MAD_CONF = [ NAME = x ] # end"),
    "no such blocks yet": ONED.replace("TM_MAD_CONF = [", "TM_CONF = [").replace("DS_MAD_CONF", "DS_CONF"),
    "lists in other forms": ONED.replace("-d dummy,shared,ssh,local", "--tm-types=dummy,ssh")
    .replace("-d dummy,fs -s shared,ssh,local -w 60", "-ddummy --system-ds-types ssh"),
    "no lists": ONED.replace(" -d dummy,shared,ssh,local", "").replace(" -d dummy,fs -s shared,ssh,local", ""),
    "bytes that are no UTF-8": ONED + "# \udcff\n",
}  # fmt: skip
LISTS = ["TM_MAD -d", "DATASTORE_MAD -d", "DATASTORE_MAD -s"]
OURS = ["TM_MAD_CONF", "DS_MAD_CONF", "INHERIT_IMAGE_ATTR", "INHERIT_DATASTORE_ATTR"]


class OnedTest(TestCase):
    def test_there_and_back_is_byte_for_byte_the_same(self) -> None:
        for name, text in FORMS.items():
            for stack in ("kernel", "chunkstore"):
                new, added = registration.register(text, stack)
                self.assertEqual([] if name == "no lists" else LISTS, added[:-4], name)
                self.assertEqual(OURS, added[-4:], name)
                self.assertEqual([], list(registration.differences(new, stack)), name)
                self.assertEqual((new, []), registration.register(new, stack), name)
                self.assertEqual(text, registration.unregister(new, added), name)

    def test_nothing_else_changes(self) -> None:
        new, _ = registration.register(ONED, "kernel")
        before, after = ONED.splitlines(), new.splitlines()
        changed = [line for line in before if line not in after]
        self.assertEqual(2, len(changed))
        self.assertTrue(all("ARGUMENTS" in line for line in changed))
        self.assertIn("-d dummy,shared,ssh,local,virtman", new)
        self.assertIn("-d dummy,fs,virtman -s shared,ssh,local,virtman -w 60", new)

    def test_the_blocks_say_what_each_stack_needs(self) -> None:
        for stack, driver, kind in (("kernel", "raw", "BLOCK"), ("chunkstore", "qcow2", "FILE")):
            new, _ = registration.register(ONED, stack)
            found = {(a.name, a.get("NAME")): a for a in attributes(new)}
            manager = found["TM_MAD_CONF", "virtman"]
            self.assertEqual(driver, manager.get("DRIVER"))
            for mode in ("SSH", "LOCAL"):  # a mode without all three would be refused by oned
                self.assertEqual(kind, manager.get(f"DISK_TYPE_{mode}"))
                self.assertEqual("SYSTEM", manager.get(f"CLONE_TARGET_{mode}"))
                self.assertEqual("NONE", manager.get(f"LN_TARGET_{mode}"))
            self.assertEqual("NO", manager.get("DS_LIVE_MIGRATE"))
            self.assertEqual("BRIDGE_LIST", found["DS_MAD_CONF", "virtman"].get("REQUIRED_ATTRS"))

    def test_disks_get_the_method_of_their_images_and_datastores(self) -> None:
        new, _ = registration.register(ONED, "kernel")
        for name in ("INHERIT_IMAGE_ATTR", "INHERIT_DATASTORE_ATTR"):
            line = f'{name} = "VIRTMAN_METHOD"\n'
            self.assertIn(f"{registration.MARK}\n{line}", new)
            lines = list(registration.differences(new.replace(line, ""), "kernel"))
            self.assertEqual([f"there is no {name} of VIRTMAN_METHOD"], lines)
            own, added = registration.register(f"{line}{ONED}", "kernel")
            self.assertNotIn(name, added)
            self.assertEqual(f"{line}{ONED}", registration.unregister(own, added))

    def test_what_an_administrator_writes_around_ours_stays(self) -> None:
        new, added = registration.register(ONED, "kernel")
        changed = new.replace(",virtman -s", ",virtman,ceph -s").replace('local,virtman"', 'virtman,local,lvm"')
        changed = changed.replace(registration.MARK, f"# mine\n{registration.MARK}").replace("PORT = 2633", "PORT = 1")
        changed = changed.replace("\n\n# mine", "\n# mine") + "# end\n"
        back = registration.unregister(changed, added)
        self.assertNotIn("virtman", back.lower())
        for kept in ("-d dummy,fs,ceph", "ssh,local,lvm", "# mine", "PORT = 1   #", "# end\n"):
            self.assertIn(kept, back)
        list(attributes(back))

    def test_what_was_there_before_us_stays(self) -> None:
        own = ONED.replace("ssh,local -w", "ssh,virtman -w")
        new, added = registration.register(own, "kernel")
        self.assertNotIn("DATASTORE_MAD -s", added)
        self.assertEqual(own, registration.unregister(new, added))

    def test_another_stack_is_put_in_the_place_of_the_first(self) -> None:
        new, added = registration.register(ONED, "kernel")
        lines = list(registration.differences(new, "chunkstore"))
        self.assertIn('TM_MAD_CONF of virtman: DRIVER is "raw" and should be "qcow2"', lines)
        other, more = registration.register(new, "chunkstore")
        self.assertEqual([], more)
        self.assertEqual(registration.register(ONED, "chunkstore")[0], other)
        self.assertEqual(ONED, registration.unregister(other, added))

    def test_what_is_in_the_way_is_refused(self) -> None:
        for old, new, why in (
            ("TM_MAD_CONF_X = ", 'TM_MAD_CONF = [ NAME = "virtman", SHARED = "YES" ]\nX = ', "did not write"),
            ("TM_MAD_CONF_X", "TM_MAD = [ EXECUTABLE = one_tm ]\nX", "there are 2"),
            ('EXECUTABLE = "one_datastore"', 'EXECUTABLE = "mine"', "there are 0"),
            ("-t 15 -d dummy,shared", '-t 15 -d \\"dummy,shared\\"', "quotes or variables"),
            ("dummy,shared,ssh,local", "dummy, shared", "has a gap"),
            ("dummy,shared,ssh,local", "dummy ,shared", "has a gap"),
            ("dummy,shared,ssh,local", "dummy,,shared", "has a gap"),
            ("dummy,shared,ssh,local", "dummy -d ssh", "more than once"),
            ("# the last one", "X = [\n Y = 1 ]", "something follows"),
        ):
            text = ONED.replace(old, new, 1)
            self.assertRaisesRegex(Refused, why, registration.register, text, "kernel")


class ExecrcTest(TestCase):
    def test_there_and_back(self) -> None:
        shorter = EXECRC.replace("kvm-qcow2 kvm-ssh", "")
        for text in (EXECRC, EXECRC.replace("\n", "\r\n"), shorter, 'LIVE_DISK_SNAPSHOTS="a"'):
            new, added = registration.enable_live(text)
            self.assertEqual(["kvm-virtman", "qemu-virtman"], added)
            self.assertEqual((new, []), registration.enable_live(new))
            self.assertEqual(text, registration.disable_live(new, added))

    def test_other_forms_are_refused(self) -> None:
        exported = EXECRC + "export LIVE_DISK_SNAPSHOTS=x\n"
        for text in ("", EXECRC * 2, EXECRC.replace('"', "'"), exported, 'LIVE_DISK_SNAPSHOTS="$X"\n'):
            self.assertRaisesRegex(Refused, "one line", registration.enable_live, text)


class GroupTest(TestCase):
    def test_there_and_back(self) -> None:
        for text in ("", "# x\n#VIRTMAN_GROUP=virtman\n", "A=1", "A=1\r\nB=2\r\n", "\n\n"):
            new = settings.set_group(text, "virtman")
            self.assertEqual("virtman", settings.group_of(new))
            self.assertEqual(new, settings.set_group(new, "virtman"))
            self.assertEqual(text, settings.unset_group(new, "virtman"))
            if text.endswith("\n"):
                self.assertEqual(text + "B=2\n", settings.unset_group(new + "B=2\n", "virtman"))

    def test_another_group_is_refused(self) -> None:
        self.assertRaisesRegex(Refused, "^line 2: .*kvm", settings.set_group, "A=1\nVIRTMAN_GROUP=kvm\n", "virtman")
        self.assertRaisesRegex(Refused, "^line 2: ", settings.group_of, "VIRTMAN_GROUP=a\nVIRTMAN_GROUP=a\n")
