"""What the operating system says of the agent's own files."""

from __future__ import annotations

import errno

from testtools import TestCase

from virtman.errors import HostTrouble, NoRoom
from virtman.hostfiles import translate_os_errors


class ToldTest(TestCase):
    def refused(self, number: int) -> None:
        with translate_os_errors("writing the record /r"):
            raise OSError(number, "refused")

    def test_a_full_file_system_and_a_used_up_quota_are_no_room(self) -> None:
        for number in (errno.ENOSPC, errno.EDQUOT):
            self.assertIn("writing the record /r", str(self.assertRaises(NoRoom, self.refused, number)))

    def test_all_else_is_trouble_of_the_host(self) -> None:
        error = self.assertRaises(HostTrouble, self.refused, errno.EIO)
        self.assertEqual("writing the record /r: refused", str(error))
