"""Whether commands of a session wait, by what the kernel says of it."""

from __future__ import annotations

from testtools import TestCase

from drivers.export.leaving import commands_wait

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
