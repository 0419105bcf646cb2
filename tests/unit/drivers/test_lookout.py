"""What is looked out for that needs no kernel of its own: sessions, on files like those of sysfs, and servers."""

from __future__ import annotations

import itertools
import shutil
import socket
import tempfile
from pathlib import Path

from testtools import TestCase

from drivers.iscsi.lookout import KNOWN, Knocks, Nudges, Sessions
from drivers.iscsi.names import target_name


class SessionsTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.sessions = Sessions(self.folder)
        self.begin(1, target_name("host-1", "debian"))

    def begin(self, number: int, target: str) -> None:
        """A session appears, which has no disk yet."""
        self.write(number, "targetname", target)
        self.write(number, "state", "LOGGED_IN")

    def write(self, number: int, name: str, text: str) -> None:
        file = self.folder / f"session{number}" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def test_an_image_changes_when_a_session_comes_changes_and_goes(self) -> None:
        self.assertEqual({"debian"}, self.sessions.changed())
        self.assertEqual(set(), self.sessions.changed())
        self.write(1, "state", "FAILED")
        self.assertEqual({"debian"}, self.sessions.changed())
        self.begin(2, target_name("host-2", "other"))
        self.assertEqual({"other"}, self.sessions.changed())
        shutil.rmtree(self.folder / "session1")
        self.assertEqual({"debian"}, self.sessions.changed())
        self.assertEqual(set(), self.sessions.changed())

    def test_an_image_changes_when_a_disk_comes_changes_and_goes(self) -> None:
        disk = "device/target0:0:0/0:0:0:0"
        self.sessions.changed()
        for state in ("running", "offline", "running"):
            self.write(1, f"{disk}/state", state)
            self.assertEqual({"debian"}, self.sessions.changed())
            self.assertEqual(set(), self.sessions.changed())
        self.write(1, f"{disk}/state", "")  # what is open tells on here, though it was removed; the kernel's does not
        shutil.rmtree(self.folder / "session1/device")
        self.assertEqual({"debian"}, self.sessions.changed())
        self.write(1, f"{disk}/state", "running")
        self.assertEqual({"debian"}, self.sessions.changed())

    def test_sessions_of_others_are_nobodys(self) -> None:
        self.sessions.changed()
        self.begin(3, "iqn.2001-04.com.example:storage")
        self.assertEqual(set(), self.sessions.changed())


class NudgesTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.now, self.sent = 1000.3, list[float]()
        self.nudges = Nudges(lambda: self.now, lambda: self.sent.append(self.now))

    def test_one_is_sent_for_all_once_the_second_has_turned(self) -> None:
        for now in (1000.3, 1000.99):
            self.now = now
            self.nudges.send(since=1000.1)
        self.assertEqual([], self.sent)
        self.now = 1001.01
        self.nudges.send(since=1000.1)
        self.assertEqual([], self.sent, "the clock that iscsid goes by may be late")
        self.now = 1001.021
        for _session in range(2):
            self.nudges.send(since=1000.1)
        self.assertEqual([1001.021], self.sent)
        self.now += self.nudges.seconds_left()
        self.nudges.send(since=1001.9)
        self.assertEqual([1001.021, self.now], self.sent)


class KnocksTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(self.listener.close)
        self.listener.settimeout(0)
        self.server = ("127.0.0.1", int(self.listener.getsockname()[1]))

        self.now = 1000.0
        self.knocks = Knocks(lambda: self.now)

    def tries(self) -> int:
        """How many connections it was asked for since the last call."""
        for number in itertools.count():
            try:
                self.listener.accept()[0].close()
            except BlockingIOError:
                return number
        raise AssertionError

    def test_a_server_is_asked_once_for_all_who_ask_soon(self) -> None:
        self.assertTrue(self.knocks.open(self.server))
        self.now += KNOWN - 0.01
        self.assertTrue(self.knocks.open(self.server))
        self.assertEqual(1, self.tries())
        self.now += 0.01
        self.assertTrue(self.knocks.open(self.server))
        self.assertEqual(1, self.tries())

    def test_one_that_takes_no_connections(self) -> None:
        self.listener.close()
        self.assertEqual([False, False], [self.knocks.open(self.server) for _ in range(2)])
