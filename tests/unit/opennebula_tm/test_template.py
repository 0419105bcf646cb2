"""What of oned.conf is understood, and what is refused."""

from __future__ import annotations

from testtools import TestCase

from opennebula_tm.installer.errors import BadSyntax
from opennebula_tm.installer.template import attributes
from tests.unit.opennebula_tm.scene import ONED


class AttributesTest(TestCase):
    def test_each_stands_where_it_says(self) -> None:
        for text in (ONED, ONED.replace("\n", "\r\n"), ONED.rstrip("\n")):
            found = list(attributes(text))
            self.assertEqual(15, len(found))
            for attribute in found:
                self.assertEqual(attribute.name, text[attribute.start :].partition(" ")[0])
                for value in (attribute.value, *attribute.pairs.values()):
                    if value is not None:
                        self.assertEqual(value.text, text[value.start : value.end])

    def test_values_in_their_forms(self) -> None:
        found = {a.name: a for a in attributes(ONED)}
        self.assertEqual("2633", found["PORT"].value and found["PORT"].value.text)
        self.assertEqual("", found["EMPTY"].value and found["EMPTY"].value.text)
        operations = found["VM_ADMIN_OPERATIONS"].value
        assert operations is not None
        self.assertEqual('migrate, delete,\n    backup, say \\"it\\"', operations.text)
        self.assertEqual({"START", "RESERVED"}, set(found["VNC_PORTS"].pairs))
        self.assertEqual("ssh", found["TM_MAD_CONF"].get("NAME"))  # keys in small letters are the same
        self.assertEqual(10, next(a.line for a in attributes(ONED) if a.name == "VNC_PORTS"))

    def test_what_is_not_understood_is_refused_with_its_line(self) -> None:
        for text, line in (
            ("A = 1\nB", 2), ("A = 1\n= 2", 2), ("A = [ B = 1", 1), ("A = [ B = 1,\n]", 2), ("A = [ B = 1\nC = 2 ]", 2),
            ("A = [ B = 1, B = 2 ]", 1), ("A = [ B = ]", 1), ('A = 1\nB = "not closed\nC = 2', 2), ('A = "x ]]>"', 1),
            ("A = ]", 1), ("A = 1\n<xml/>", 2),
        ):  # fmt: skip
            self.assertRaisesRegex(BadSyntax, f"^line {line}: ", list, attributes(text))
