"""An only parent that is back."""

from __future__ import annotations

from testtools import TestCase

from drivers.attach.returns import Returns
from drivers.kernel.tcpsockets import Link

FIRST, SECOND, THIRD = (Link("192.0.2.1", 3260, port) for port in (40000, 40001, 40002))


class ReturnsTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.returns = Returns()

    def test_one_that_has_answered_over_another_connection_is_trusted(self) -> None:
        told = [self.returns.is_trusted(link, answered) for link, answered in ((FIRST, 5), (SECOND, 6), (THIRD, 7))]
        self.assertEqual([False, True, True], told)

    def test_one_that_has_answered_nothing_since_is_asked(self) -> None:
        told = [self.returns.is_trusted(link, answered) for link, answered in ((FIRST, 5), (SECOND, 6), (THIRD, 6))]
        self.assertEqual([False, True, False], told)

    def test_one_whose_connection_is_the_same_or_unknown_is_asked(self) -> None:
        told = [self.returns.is_trusted(link, answered) for link, answered in ((FIRST, 5), (FIRST, 6), (None, 7))]
        self.assertEqual([False, False, False], told)
        self.assertFalse(self.returns.is_trusted(SECOND, 8), "nobody knows what it had before")

    def test_one_that_was_not_the_only_one_is_asked(self) -> None:
        self.returns.is_trusted(FIRST, 5)
        self.returns.forget()
        self.assertFalse(self.returns.is_trusted(SECOND, 6))
