"""The pipe to one caller, and the caller's end of it."""

from __future__ import annotations

import io
import socket
import stat
import threading
from functools import partial

from testtools import TestCase

from tests.unit.virtman.agents import SOON
from tests.unit.virtman.scene import folder_for
from virtman import pipe
from virtman.errors import CallerGone
from virtman.pipe import PREFIX, Caller, Pipe, Pump, into, sweep


class PipeTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.pipe = Pipe(self.folder)
        self.addCleanup(self.pipe.close)

    def test_it_is_for_its_owner_alone(self) -> None:
        self.assertEqual(0o600, stat.S_IMODE(self.pipe.path.stat().st_mode))

    def test_a_caller_who_does_not_come_is_not_waited_for(self) -> None:
        self.patch(pipe, "COMES_WITHIN", 0.01)
        self.assertIn("nobody connected", str(self.assertRaises(CallerGone, self.pipe.caller().__enter__)))
        self.assertEqual([], [*self.folder.iterdir()])

    def test_what_a_killed_agent_left_is_swept_away_and_nothing_else(self) -> None:
        (self.folder / "agent.sock").touch()
        (self.folder / f"{PREFIX}1f").touch()
        sweep(self.folder)
        self.assertEqual([self.folder / "agent.sock"], [*self.folder.iterdir()])


class CallerTest(TestCase):
    def test_one_who_hung_up_gets_nothing(self) -> None:
        ours, theirs = socket.socketpair()
        self.addCleanup(ours.close)
        theirs.close()
        self.assertIn("hung up", str(self.assertRaises(CallerGone, Caller(ours).write, b"data")))


class HeldBack(io.BytesIO):
    """Takes nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.may.wait(SOON)
        return super().write(data)


class PumpTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.listener = self.enterContext(socket.socket(socket.AF_UNIX))
        self.path = str(folder_for(self) / "pipe")
        self.listener.bind(self.path)
        self.listener.listen()

    def start(self, pump: Pump) -> socket.socket:
        """The agent's end."""
        pump.start(self.path)
        return self.enterContext(self.listener.accept()[0])

    def test_it_ends_when_all_is_copied(self) -> None:
        target = HeldBack()
        with Pump(partial(into, target)) as pump:
            agent = self.start(pump)
            agent.sendall(b"data")
            agent.close()
            target.may.set()
        self.assertEqual(b"data", target.getvalue())

    def test_after_an_error_no_more_is_copied(self) -> None:
        copied = threading.Event()

        def copy(sock: socket.socket) -> None:
            sock.recv(1)  # which the agent never sends
            copied.set()

        def fail() -> None:
            with Pump(copy) as pump:
                self.start(pump)
                raise CallerGone("an error of the agent")

        self.assertRaises(CallerGone, fail)
        self.assertTrue(copied.wait(SOON))
