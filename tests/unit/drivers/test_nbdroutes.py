"""Routes to parents that go, over servers that greet and answer nothing."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import shutil
import socket
import struct
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

from testtools import TestCase

from drivers.attach.hangs import REST
from drivers.attach.nbd import ASK_INTERVAL, NbdAttach
from drivers.base import Endpoint, Image, Parent, PathState, Place
from drivers.nbd.endpoints import socket_of
from drivers.nbd.hold import HoldingServer
from tests.patience import PATIENCE
from tests.userspace.drivers.hosts import until

IMAGE = Image("img", 1 << 20, f"sha256:{'a' * 64}")
_REQUEST, _REPLY, _DISCONNECT = struct.Struct(">IHHQQI"), struct.Struct(">IIQ"), 2
asked, answered = threading.Event(), threading.Event()
ACTIVE, STANDBY, LOST = PathState.ACTIVE, PathState.STANDBY, PathState.LOST


class AnsweringServer(HoldingServer):
    """Answers reads, of one client after the other."""

    error = 0

    def before_answer(self) -> None:
        """A read was asked for."""

    def after_answer(self) -> None:
        """It was answered."""

    def _negotiate(self, client: socket.socket) -> None:
        super()._negotiate(client)
        client.settimeout(None)
        while len(request := client.recv(_REQUEST.size, socket.MSG_WAITALL)) == _REQUEST.size:
            _, _, command, handle, _, length = _REQUEST.unpack(request)
            if command == _DISCONNECT:
                break
            self.before_answer()
            client.sendall(_REPLY.pack(0x67446698, self.error, handle) + bytes(0 if self.error else length))
            self.after_answer()
        raise ConnectionError("it hung up")


class Failing(AnsweringServer):
    """Answers reads with an error (EIO)."""

    error = 5


class Slow(AnsweringServer):
    """Answers when another one has been asked."""

    def before_answer(self) -> None:
        asked.wait(PATIENCE)

    def after_answer(self) -> None:
        answered.set()


class StillSlower(AnsweringServer):
    """Answers after the slow one."""

    def before_answer(self) -> None:
        asked.set()
        answered.wait(PATIENCE)


class TooLate(AnsweringServer):
    """Answers, but not within what LateReturnTest takes for soon."""

    def before_answer(self) -> None:
        asked.wait(0.5)


class Hanging(HoldingServer):
    """Says when it was asked for a read, which it does not answer."""

    def _negotiate(self, client: socket.socket) -> None:
        super()._negotiate(client)
        client.settimeout(None)
        client.recv(_REQUEST.size, socket.MSG_WAITALL)
        asked.set()


class Late(AnsweringServer):
    """Greets when the hanging one has been asked."""

    def _negotiate(self, client: socket.socket) -> None:
        asked.wait(PATIENCE)
        asked.clear()
        super()._negotiate(client)


class RouteCase(TestCase):
    """A host with some parents."""

    kinds: tuple[type[HoldingServer], ...] = (HoldingServer, HoldingServer)
    return_limit = PATIENCE

    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="vm-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.lost: list[str] = []
        place = Place(self.folder, self.folder, host="here", address="")
        self.now = 1000.0
        self.attach = NbdAttach(
            place,
            lost=lambda _image, parent: self.lost.append(parent.host),
            greeting_limit=0.5,
            return_limit=self.return_limit,
            clock=lambda: self.now,
        )
        self.addCleanup(self.attach.close)
        asked.clear()
        answered.clear()
        self.parents = [Parent(host, f"unix://{self.folder}/{host}", "") for host in "abc"[: len(self.kinds)]]
        self.a, self.b, *_ = [self.serve(*each) for each in zip(self.parents, self.kinds, strict=True)]
        self.device = self.attach.connect(IMAGE, self.parents)

    def serve(self, parent: Parent, kind: type[HoldingServer] = HoldingServer) -> ExitStack:
        """A server of the parent's that may be closed again."""
        path = socket_of(Endpoint(parent.address, IMAGE.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        server = ExitStack()
        server.enter_context(kind(path, IMAGE.size))
        self.addCleanup(server.close)
        return server

    def first_is_now(self, kind: type[HoldingServer]) -> None:
        """Once the first parent was lost, it is another one."""
        until(lambda: bool(self.lost))
        self.a.close()
        self.a = self.serve(self.parents[0], kind)

    def states(self) -> list[PathState]:
        return [path.state for path in self.attach.paths(IMAGE.name)]

    def await_return(self, attach: NbdAttach | None = None) -> None:
        """Look again and again, until a better parent has answered."""

        def looks() -> bool:
            self.now += ASK_INTERVAL
            return (attach or self.attach).unsettled(IMAGE.name)

        until(looks)


class FailOverTest(RouteCase):
    @staticmethod
    def nor_does_another(said: queue.SimpleQueue[logging.LogRecord]) -> bool:
        """Whether that was said of the first parent."""
        return any(said.get().msg.endswith("parent a does not answer, nor does another") for _ in range(said.qsize()))

    def test_the_next_parent_is_read_from_and_the_lost_one_told_of_once(self) -> None:
        self.assertEqual([ACTIVE, STANDBY], self.states())
        self.a.close()
        until(lambda: bool(self.lost))
        self.assertEqual((["a"], [LOST, ACTIVE]), (self.lost, self.states()))

    def test_a_parent_that_answers_no_read_is_left_once_another_one_answers(self) -> None:
        said: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        handler = logging.handlers.QueueHandler(said)
        logging.getLogger("drivers").addHandler(handler)
        self.addCleanup(logging.getLogger("drivers").removeHandler, handler)
        until(lambda: bool(self.lost) or self.nor_does_another(said))
        self.assertEqual(([], [ACTIVE, STANDBY]), (self.lost, self.states()))
        self.b.close()
        self.serve(self.parents[1], AnsweringServer)
        until(lambda: bool(self.lost))
        self.assertEqual((["a"], ACTIVE), (self.lost, self.states()[1]))

    def test_one_that_went_away_has_not_hung_and_is_taken_back_with_the_next_list(self) -> None:
        self.a.close()
        until(lambda: bool(self.lost))
        self.serve(self.parents[0])
        self.attach.update(IMAGE, [*self.parents, Parent("c", f"unix://{self.folder}/c", "")])
        self.assertEqual([ACTIVE, STANDBY, LOST], self.states())

    def test_a_better_parent_that_has_left_the_list_meanwhile_is_not_gone_to(self) -> None:
        route = self.attach._routes.of(IMAGE.name)
        left = Parent("left", f"unix://{self.folder}/left", "")
        route._fail_over(self.parents[0], route._sockets[self.parents[0]], left)
        self.assertIn(ACTIVE, self.states())

    def test_no_parent_is_active_while_none_serves(self) -> None:
        self.b.close()
        self.a.close()
        until(lambda: bool(self.lost))
        self.assertEqual((["a"], [LOST, LOST]), (self.lost, self.states()))
        self.serve(self.parents[0])
        until(lambda: self.states() == [ACTIVE, LOST])
        self.assertEqual(["a"], self.lost, "it is back")


class SlowTest(RouteCase):
    kinds = (Slow, StillSlower)

    def test_a_parent_that_answers_before_another_one_does_is_only_slow(self) -> None:
        self.assertTrue(answered.wait(PATIENCE))
        answered.clear()
        self.assertTrue(answered.wait(PATIENCE), "it is asked on")
        self.assertEqual(([], [ACTIVE, STANDBY]), (self.lost, self.states()))


class HiddenTest(RouteCase):
    kinds = (HoldingServer, Hanging, Late)

    def test_one_that_greets_and_does_not_answer_does_not_hide_one_that_does(self) -> None:
        until(lambda: bool(self.lost))
        self.assertEqual((["a"], [STANDBY, STANDBY, ACTIVE]), (self.lost, self.states()))


class Silent(HoldingServer):
    """Does not greet."""

    def _negotiate(self, client: socket.socket) -> None:
        client.recv(1)


class SilentTest(RouteCase):
    kinds = (Silent, AnsweringServer)

    def test_one_that_does_not_greet_is_left_and_rests_no_longer_the_next_time(self) -> None:
        for _ in range(2):
            until(lambda: bool(self.lost))
            self.assertEqual([STANDBY, ACTIVE], self.states())
            self.lost.clear()
            self.now += REST
            self.attach.update(IMAGE, self.parents[:1])
            self.attach.update(IMAGE, self.parents)
        until(lambda: bool(self.lost))


class FailingTest(RouteCase):
    kinds = (Failing, HoldingServer, AnsweringServer)

    def test_one_that_fails_reads_is_left_for_one_that_answers_them(self) -> None:
        until(lambda: bool(self.lost))
        self.assertEqual((["a"], [STANDBY, STANDBY, ACTIVE]), (self.lost, self.states()))


class FailingAndRestingTest(RouteCase):
    kinds = (Failing, AnsweringServer)

    def test_one_that_fails_reads_rests(self) -> None:
        self.first_is_now(AnsweringServer)
        self.now += ASK_INTERVAL
        self.assertFalse(self.attach.unsettled(IMAGE.name))
        self.now += REST
        self.await_return()


class RestTest(RouteCase):
    kinds = (HoldingServer, AnsweringServer)

    def test_one_that_hung_is_not_taken_back_with_the_next_list(self) -> None:
        until(lambda: bool(self.lost))
        another = Parent("c", f"unix://{self.folder}/c", "")
        self.attach.update(IMAGE, [*self.parents, another])
        self.assertEqual((["a"], [STANDBY, ACTIVE, LOST]), (self.lost, self.states()))
        self.b.close()
        until(lambda: len(self.lost) > 1)
        self.assertEqual((["a", "b"], [ACTIVE, LOST, LOST]), (self.lost, self.states()), "it is better than none")

    def test_one_that_hung_and_answers_after_its_rest_is_read_from_again_by_who_connects(self) -> None:
        self.first_is_now(AnsweringServer)
        self.assertFalse(self.attach.unsettled(IMAGE.name), "it rests")
        self.now += REST
        self.await_return()
        device = self.attach.connect(IMAGE, self.parents)
        self.assertNotEqual(self.device, device, "or the daemon would stay with the other one")
        self.assertEqual(([ACTIVE, STANDBY], False), (self.states(), self.attach.unsettled(IMAGE.name)))

    def test_one_that_does_not_answer_after_its_rest_is_not_gone_back_to_and_a_new_list_may_name_it(self) -> None:
        until(lambda: bool(self.lost))
        self.now += REST
        self.assertFalse(self.attach.unsettled(IMAGE.name))
        self.assertEqual([STANDBY, ACTIVE], self.states())
        self.attach.update(IMAGE, [*self.parents, Parent("c", f"unix://{self.folder}/c", "")])
        self.assertEqual([ACTIVE, STANDBY, LOST], self.states())

    def answers_again(self) -> None:
        """The first parent, after its rest."""
        self.first_is_now(AnsweringServer)
        self.now += REST
        self.await_return()

    def test_one_that_a_new_list_puts_later_is_not_gone_back_to_though_it_answered(self) -> None:
        self.answers_again()
        self.attach.update(IMAGE, self.parents[::-1])
        self.assertEqual([ACTIVE, STANDBY], self.states())

    def test_an_answer_that_a_list_of_parents_overtakes_does_not_count(self) -> None:
        self.first_is_now(StillSlower)
        self.now += REST
        asking = threading.Thread(target=self.attach.unsettled, args=(IMAGE.name,))
        asking.start()
        self.assertTrue(asked.wait(PATIENCE))
        self.attach.update(IMAGE, self.parents[::-1])
        answered.set()
        asking.join(PATIENCE)
        self.attach.connect(IMAGE, self.parents[::-1])
        self.assertEqual([ACTIVE, STANDBY], self.states())

    def test_one_that_answers_and_has_left_the_list_is_not_gone_back_to(self) -> None:
        self.answers_again()
        self.attach.update(IMAGE, self.parents[1:])
        self.assertEqual([ACTIVE], self.states())

    def test_one_that_was_gone_back_to_is_not_for_a_second_time_by_the_same_answer(self) -> None:
        self.answers_again()
        self.attach.connect(IMAGE, self.parents)
        self.a.close()
        until(lambda: len(self.lost) > 1)
        self.serve(self.parents[0])
        self.assertFalse(self.attach.update(IMAGE, self.parents))
        self.assertEqual([STANDBY, ACTIVE], self.states())

    def test_one_that_did_not_answer_is_not_asked_again_at_once(self) -> None:
        until(lambda: bool(self.lost))
        self.now += REST
        self.assertFalse(self.attach.unsettled(IMAGE.name))
        self.a.close()
        self.serve(self.parents[0], AnsweringServer)
        self.assertFalse(self.attach.unsettled(IMAGE.name))
        self.await_return()

    def test_one_that_hangs_again_rests_for_longer(self) -> None:
        until(lambda: bool(self.lost))
        self.lost.clear()
        self.now += REST
        self.attach.update(IMAGE, self.parents[:1])
        self.attach.update(IMAGE, self.parents)
        until(lambda: bool(self.lost))
        self.now += REST
        self.attach.update(IMAGE, [*self.parents, Parent("c", f"unix://{self.folder}/c", "")])
        self.assertEqual([STANDBY, ACTIVE, LOST], self.states())

    def test_what_it_answered_before_the_last_look_does_not_count(self) -> None:
        self.answers_again()
        self.a.close()
        self.assertFalse(self.attach.unsettled(IMAGE.name))
        self.attach.connect(IMAGE, self.parents)
        self.assertEqual([LOST, ACTIVE], self.states())

    def test_one_that_comes_later_in_the_list_is_not_gone_back_to(self) -> None:
        until(lambda: bool(self.lost))
        self.attach.update(IMAGE, self.parents[::-1])
        self.now += REST
        self.assertFalse(self.attach.unsettled(IMAGE.name))

    def test_a_driver_that_begins_with_a_later_one_goes_back_to_the_first(self) -> None:
        until(lambda: bool(self.lost))
        self.attach.close()
        self.a.close()
        self.serve(self.parents[0], AnsweringServer)
        place = Place(self.folder, self.folder, host="here", address="")
        attach = NbdAttach(place, lost=lambda _image, _parent: None, return_limit=PATIENCE, clock=lambda: self.now)
        self.addCleanup(attach.close)
        device = attach.connect(IMAGE, self.parents)
        self.assertEqual([STANDBY, ACTIVE], [path.state for path in attach.paths(IMAGE.name)])
        self.await_return(attach)
        self.assertNotEqual(device, attach.connect(IMAGE, self.parents))

    def test_an_image_without_a_route_is_settled(self) -> None:
        self.assertFalse(self.attach.unsettled("other"))


class ReturnTest(RouteCase):
    kinds = (HoldingServer, HoldingServer, AnsweringServer)

    def test_the_one_that_answers_is_gone_back_to_and_not_one_before_it_that_listens(self) -> None:
        until(lambda: bool(self.lost))
        self.b.close()
        self.serve(self.parents[1], AnsweringServer)
        self.now += REST
        self.await_return()
        self.attach.connect(IMAGE, self.parents)
        self.assertEqual([STANDBY, ACTIVE, STANDBY], self.states())

    def test_of_several_that_answer_the_first_is_gone_back_to(self) -> None:
        until(lambda: bool(self.lost))
        for server, parent, kind in ((self.a, self.parents[0], StillSlower), (self.b, self.parents[1], Slow)):
            server.close()
            self.serve(parent, kind)
        self.now += REST
        self.await_return()
        self.attach.connect(IMAGE, self.parents)
        self.assertEqual([ACTIVE, STANDBY, STANDBY], self.states())


class LateReturnTest(RouteCase):
    kinds = (HoldingServer, AnsweringServer)
    return_limit = 0.1

    def test_one_that_answers_too_late_to_stay_is_not_gone_back_to(self) -> None:
        self.first_is_now(TooLate)
        self.now += REST
        self.assertFalse(self.attach.unsettled(IMAGE.name))
