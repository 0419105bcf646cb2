"""What the monitor of parents tells an image."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

from testtools import TestCase

from drivers.attach import iscsimonitor
from drivers.attach.iscsimonitor import INTERVAL, STALL, Monitor
from drivers.iscsi.names import target_name
from drivers.iscsi.records import Target
from drivers.iscsi.sessions import Session
from drivers.kernel import devmapper
from drivers.kernel.diskstats import StallClock

PARENT = Target(target_name("host-1", "debian"), "10.9.0.2", 3260)
FOREIGN = Target("iqn.2001-04.com.example:storage", "10.9.0.9", 3260)


class MonitorTest(TestCase):
    """Two images, the first of which has a session with a parent."""

    def setUp(self) -> None:
        super().setUp()
        self.now, self.under_way, self.sessions = 1000.0, "1", dict[Target, Session]()
        self.monitor = Monitor("virtman-attach-")
        self.monitor._clock = StallClock(lambda _disk: (5, 1))
        self.routes: list[Any] = [
            mock.Mock(map=f"virtman-attach-{name}", settled=False) for name in ("debian", "other")
        ]
        for route, name, disk in zip(self.routes, ("debian", "other"), ("8:0", "8:16"), strict=True):
            route.image.name, route.disks = name, {disk}
        counted = mock.Mock(side_effect=lambda name: ["0"] * 8 + [self.under_way if name.endswith("debian") else "0"])
        for module, name, double in (
            (iscsimonitor, "sessions", lambda: self.sessions),
            (devmapper, "counted", counted),
            (time, "monotonic", lambda: self.now),
        ):
            self.enterContext(mock.patch.object(module, name, double))

    def told_of_logins(self) -> list[bool]:
        """Look at the sessions; which images are told that one of theirs has changed."""
        for route in self.routes:
            route.note_logins.reset_mock()
        self.monitor._check_sessions(self.routes)
        return [route.note_logins.called for route in self.routes]

    def test_an_image_is_told_when_a_session_of_its_own_is_logged_in_and_when_it_is_not_any_more(self) -> None:
        for target, logged_in, told in (
            (PARENT, False, False),
            (PARENT, True, True),
            (FOREIGN, True, False),
            (PARENT, True, False),
            (PARENT, False, True),
        ):
            self.sessions[target] = Session("session1", target, logged_in)
            self.assertEqual([told, False], self.told_of_logins())

    def test_a_disk_is_stalled_after_a_while_in_which_reads_of_its_map_wait(self) -> None:
        for _ in range(int(STALL / INTERVAL)):
            self.monitor._check_disks(self.routes)
            self.routes[0].note_stall.assert_not_called()
            self.now += INTERVAL
        self.monitor._check_disks(self.routes)
        self.routes[0].note_stall.assert_called_once_with("8:0")
        self.routes[1].note_stall.assert_not_called()
        self.under_way = "0"
        self.monitor._check_disks(self.routes)
        self.assertFalse(self.monitor.is_stalled("8:0"), "what is under way is a probe")
