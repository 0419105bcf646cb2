"""When a parent that does not answer reads is left."""

from __future__ import annotations

from collections.abc import Collection
from unittest import mock

from testtools import TestCase

from drivers.attach import iscsihealth
from drivers.attach.iscsihealth import HealthCheck
from drivers.attach.quarantine import QUARANTINE, Quarantine
from drivers.base import Image
from drivers.iscsi.records import Target

IMAGE = Image("debian", 1 << 20, f"sha256:{'a' * 64}")
FIRST, SECOND, THIRD = (Target(f"iqn:{host}", "10.9.0.2", 3260) for host in ("first", "second", "third"))
DISKS = {"8:0": FIRST, "8:16": SECOND, "8:32": THIRD}


class HealthCheckTest(TestCase):
    """A host with sessions to three parents."""

    def setUp(self) -> None:
        super().setUp()
        self.now = 1000.0
        self.stalled: set[Target] = set()
        self.answering: Collection[Target] = {FIRST, SECOND, THIRD}
        self.sessions = {target: mock.Mock(name=str(target)) for target in DISKS.values()}
        for target, session in self.sessions.items():
            session.cut.side_effect = lambda target=target: self.stalled.discard(target)
        monitor = mock.Mock()
        monitor.is_stalled = lambda number: DISKS[number] in self.stalled
        self.quarantine: Quarantine[Target] = Quarantine(lambda: self.now)
        self.health = HealthCheck(IMAGE, monitor, self.quarantine)
        self.health.parents, self.health.disks = {FIRST, SECOND, THIRD}, DISKS
        for name, double in (
            ("sessions", lambda _image: self.sessions),
            ("readable_number_of", lambda *_: "8:0"),
            ("first_that_answers", lambda disks: next((each for each in disks if each in self.answering), None)),
        ):
            self.enterContext(mock.patch.object(iscsihealth, name, double))

    def left(self, target: Target) -> bool:
        """Whether a parent that is stalled is left."""
        self.stalled.add(target)
        self.health.check(target)
        return target not in self.stalled

    def test_a_parent_that_is_stalled_is_left_while_another_answers_and_comes_last_for_a_minute(self) -> None:
        self.assertTrue(self.left(FIRST))
        self.assertEqual([SECOND, FIRST], self.quarantine.in_order([FIRST, SECOND]))
        self.now += QUARANTINE
        self.assertEqual([FIRST, SECOND], self.quarantine.in_order([FIRST, SECOND]))

    def test_nobody_is_left_while_no_other_parent_answers(self) -> None:
        self.answering = {FIRST}
        self.assertFalse(self.left(FIRST))
        self.assertFalse(self.quarantine.holds(FIRST))

    def test_nobody_is_left_for_a_parent_in_quarantine_or_one_that_is_stalled_too(self) -> None:
        self.quarantine.add(SECOND)
        self.stalled.add(THIRD)
        self.assertFalse(self.left(FIRST))

    def test_a_parent_that_answers_while_others_are_asked_stays(self) -> None:
        def ask(_disks: object) -> Target:
            self.stalled.discard(FIRST)
            return SECOND

        self.stalled.add(FIRST)
        with mock.patch.object(iscsihealth, "first_that_answers", ask):
            self.health.check(FIRST)
        self.sessions[FIRST].cut.assert_not_called()

    def test_a_parent_that_is_not_on_the_list_any_more_is_left_at_once(self) -> None:
        self.health.parents, self.answering = {SECOND}, ()
        self.assertTrue(self.left(FIRST))
