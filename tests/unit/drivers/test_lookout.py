"""What is looked out for that needs no kernel of its own: sessions, on files like those of sysfs, and servers."""

from __future__ import annotations

import itertools
import shutil
import socket
import tempfile
import threading
from pathlib import Path

from testtools import TestCase

from drivers.attach.doubts import INTERVAL, LEAST_INTERVAL
from drivers.iscsi.lookout import KNOCK_LIMIT, KNOWN, Knocks, Nudges, Pace, Sessions
from drivers.iscsi.names import target_name
from tests.limits import no_more_files
from tests.unit.drivers.openfiles import open_files, process_file

LIMIT = 60.0
"""Seconds after which a thread has failed."""


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

    def test_files_that_go_while_they_are_open_are_a_change_and_nothing_stays_open_of_them(self) -> None:
        state, before = self.folder / "session1/state", open_files()
        with process_file() as file:
            state.unlink()
            state.symlink_to(file)
            self.assertEqual({"debian"}, self.sessions.changed())
        self.assertEqual({"debian"}, self.sessions.changed())
        self.assertEqual(before, open_files())

    def test_what_is_open_is_closed_at_the_end(self) -> None:
        before = open_files()
        self.sessions.changed()
        self.assertEqual(before + 1, open_files())
        self.sessions.close()
        self.assertEqual(before, open_files())

    def test_a_session_that_is_seen_before_it_has_its_name_is_known_by_it_afterwards(self) -> None:
        self.sessions.changed()
        self.begin(4, "(null)")
        self.assertEqual(set(), self.sessions.changed())
        self.write(4, "targetname", target_name("host-2", "other"))
        self.assertEqual({"other"}, self.sessions.changed())

    def test_sessions_of_others_are_nobodys(self) -> None:
        self.sessions.changed()
        self.begin(3, "iqn.2001-04.com.example:storage")
        self.assertEqual(set(), self.sessions.changed())

    def test_who_has_no_room_to_look_is_told_so_and_not_that_all_have_gone(self) -> None:
        self.sessions.changed()
        with no_more_files():
            self.assertRaises(OSError, self.sessions.changed)
        self.assertEqual(set(), self.sessions.changed())

    def test_a_session_of_ours_may_have_the_number_of_anothers_that_went(self) -> None:
        self.begin(2, "iqn.2001-04.com.example:storage")
        self.sessions.changed()
        shutil.rmtree(self.folder / "session2")
        self.sessions.changed()
        self.begin(2, target_name("host-2", "other"))
        self.assertEqual({"other"}, self.sessions.changed())


class PaceTest(TestCase):
    def test_sessions_are_looked_at_each_second_and_after_a_change_at_each_look_for_a_while(self) -> None:
        pace = Pace()
        self.assertEqual([0.0, 1.0, 2.0, 3.0], self.looks(pace, 0, 4))
        pace.note_change(3.75)
        self.assertEqual(39, len(self.looks(pace, 4, 13.75)))
        self.assertEqual([14.5, 15.5], self.looks(pace, 13.75, 16))

    def looks(self, pace: Pace, begin: float, end: float) -> list[float]:
        """When a look is due of those that come four times a second."""
        times = [begin + 0.25 * number for number in range(int(4 * (end - begin)))]
        return [now for now in times if pace.is_due(now)]


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

    def test_who_is_first_seen_just_after_the_turn_is_nudged_when_it_has_turned_for_iscsid(self) -> None:
        for now, sent in ((1001.012, 0), (1001.021, 1), (1001.9, 1), (1002.019, 1), (1002.021, 2)):
            self.now = now
            self.nudges.send(since=1001.01)
            self.assertEqual((now, sent), (now, len(self.sent)))

    def test_it_goes_on_each_second_for_who_is_not_logged_in_for_long(self) -> None:
        for second in range(1001, 1005):
            for within in (0.5, 0.9):
                self.now = second + within
                self.nudges.send(since=1000.5)
        self.assertEqual(4, len(self.sent))

    def test_the_next_is_of_use_just_after_the_second_turns(self) -> None:
        for now, seconds in ((1000.0, 0.02), (1000.01, 0.01), (1000.02, 1.0), (1000.3, 0.72), (1000.99, 0.03)):
            self.now = now
            self.assertEqual(seconds, round(self.nudges.seconds_left(), 6))


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

    def test_who_looks_at_a_silent_parent_has_each_look_ask_anew(self) -> None:
        for seconds in (0.0, 0.1, KNOCK_LIMIT):  # that an answer takes
            self.assertEqual((seconds, 10), (seconds, self.knocked_by_looks(10, seconds)))

    def knocked_by_looks(self, looks: int, seconds: float) -> int:
        """How often it was asked by looks like those of doubts, of which some take a bit longer until they ask."""
        tried: list[float] = []

        def knock(_: object) -> bool:
            tried.append(self.now)
            self.now += seconds
            return False

        knocks = Knocks(lambda: self.now, knock)
        for number in range(looks):
            began = self.now
            self.now += 0.02 if number % 2 == 0 else 0.001
            self.assertFalse(knocks.open(self.server))
            self.now += max(LEAST_INTERVAL, INTERVAL - (self.now - began))
        return len(tried)

    def test_who_waits_for_an_answer_does_not_ask_again(self) -> None:
        for answer in (False, True):
            self.assertEqual(([answer, answer], 1), self.asked_while_another_asks(answer))

    def asked_while_another_asks(self, answer: bool) -> tuple[list[bool], int]:
        """What both hear, and how often it was tried."""
        asked, answers, tries = threading.Event(), [], []
        other = threading.Thread(target=lambda: answers.append(knocks.open(self.server)), daemon=True)

        def clock() -> float:
            if threading.current_thread() is other:
                asked.set()
            return self.now

        def knock(_: object) -> bool:
            tries.append(self.now)
            if len(tries) == 1:
                self.now += 0.1
                other.start()
                self.assertTrue(asked.wait(LIMIT))
                self.now += KNOCK_LIMIT
            return answer

        knocks = Knocks(clock, knock)
        answers.append(knocks.open(self.server))
        other.join(LIMIT)
        return answers, len(tries)

    def test_one_that_takes_no_connections(self) -> None:
        self.listener.close()
        self.assertEqual([False, False], [self.knocks.open(self.server) for _ in range(2)])
