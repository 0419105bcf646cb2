"""Where open-iscsi has its records, and what cannot be read of sessions."""

from __future__ import annotations

import errno

from testtools import TestCase

from drivers.iscsi.records import folder
from drivers.iscsi.sessions import may_go
from tests.unit.virtman.scene import folder_for


class FolderTest(TestCase):
    def test_it_is_in_the_first_database_that_the_machine_has_and_else_in_the_last_one(self) -> None:
        newer, older = [folder_for(self) / name for name in ("var", "etc")]
        self.assertEqual(older / "nodes", folder((newer, older)))
        newer.mkdir()
        self.assertEqual(newer / "nodes", folder((newer, older)))


class MayGoTest(TestCase):
    def test_what_is_going_is_not_there(self) -> None:
        for number in (errno.ENOENT, errno.ENODEV, errno.ENOTCONN):
            with may_go():
                raise OSError(number, "gone")
        with may_go(StopIteration):
            next(iter(()))

    def test_who_has_no_room_to_look_knows_nothing_of_it(self) -> None:
        for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            error = self.assertRaises(OSError, self.look, number)
            self.assertEqual(number, error.errno)

    @staticmethod
    def look(number: int) -> None:
        with may_go():
            raise OSError(number, "no room")
