"""Children that were sent away are looked after until their sessions have ended."""

from __future__ import annotations

import threading

from testtools import TestCase

from drivers.errors import DriverError
from drivers.export.leaving import FIRST_PAUSE, LONGEST_PAUSE, Leaving, commands_wait
from tests.patience import PATIENCE
from tests.unit.logs import Logged

SESSION = """\
InitiatorName: iqn.2026-01.org.virtman:origin
InitiatorAlias: origin
LIO Session ID: 1   ISID: 0x00 02 3d 00 00 01  TSIH: 1  SessionType: Normal
Session State: TARG_SESS_STATE_LOGGED_IN
---------------------[iSCSI Session Values]-----------------------
  CmdSN/WR  :  CmdSN/WC  :  ExpCmdSN  :  MaxCmdSN  :     ITT    :     TTT
 0x00000040   0x000000{more}   0x00000024   0x00000062   0x00000024   0x00000022
----------------------[iSCSI Connections]-------------------------
"""
CONNECTION = """\
CID: 0  Connection State: TARG_CONN_STATE_LOGGED_IN
   Address 127.0.0.1 TCP  StatSN: 0xab2b7625
"""
"""As Linux 6.1 said of a session with a read that waited (3f), and after it (40)."""


class CommandsWaitTest(TestCase):
    def test_a_session_that_may_not_send_as_many_as_ever_waits_for_answers(self) -> None:
        self.assertTrue(commands_wait(SESSION.format(more="3f") + CONNECTION))
        self.assertFalse(commands_wait(SESSION.format(more="40") + CONNECTION))

    def test_nothing_waits_without_a_session_or_a_connection(self) -> None:
        self.assertFalse(
            commands_wait("No active iSCSI Session for Initiator Endpoint: iqn.2026-01.org.virtman:origin\n")
        )
        self.assertFalse(commands_wait(SESSION.format(more="3f")))

    def test_what_another_kernel_may_say_counts_as_waiting(self) -> None:
        self.assertTrue(commands_wait(CONNECTION))


class Door:
    """Says what it is told to, each time somebody is to be seen off; the last answer is for ever after."""

    def __init__(self, *answers: bool | DriverError) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.closed = threading.Event()

    def see_off(self, image: str) -> bool:
        self.asked.append(image)
        answer = self.answers.pop(0)
        if isinstance(answer, DriverError):
            raise answer
        if not self.answers:
            self.closed.set()
        return answer


class LeavingTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.slept: list[float] = []

    def look_after(self, door: Door) -> Leaving:
        leaving = Leaving(door.see_off, self.slept.append)
        leaving.look_after("image")
        self.assertTrue(door.closed.wait(PATIENCE))
        return leaving

    def test_it_looks_until_all_have_gone_and_less_and_less_often(self) -> None:
        door = Door(False, False, False, False, False, True)
        self.look_after(door)
        self.assertEqual(["image"] * 6, door.asked)
        self.assertEqual([FIRST_PAUSE * 2**times for times in range(4)] + [LONGEST_PAUSE] * 2, self.slept)

    def test_a_look_that_fails_is_told_of_and_repeated(self) -> None:
        heard = Logged(self, "drivers.export.leaving")
        door = Door(DriverError("stuck"), True)
        self.look_after(door)
        self.assertEqual(2, len(door.asked))
        self.assertEqual(1, len([line for line in heard.lines if "stuck" in line]))
