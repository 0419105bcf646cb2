"""Starting and stopping as a whole."""

from __future__ import annotations

from testtools import TestCase

from lab.errors import NotReady
from lab.running import Running


class Part(Running):
    """Something that fails when it is told to, and remembers what was asked of it."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.asked = failing, list[str]()

    def start(self) -> None:
        self._do("start")

    def stop(self) -> None:
        self._do("stop")

    def _do(self, what: str) -> None:
        self.asked.append(what)
        if what in self.failing:
            raise NotReady(what)


class RunningTest(TestCase):
    def test_it_is_stopped_at_the_end(self) -> None:
        with Part() as part:
            self.assertEqual(["start"], part.asked)
        self.assertEqual(["start", "stop"], part.asked)

    def test_what_a_failed_start_made_is_stopped(self) -> None:
        part = Part("start")
        self.assertRaises(NotReady, part.__enter__)
        self.assertEqual(["start", "stop"], part.asked)

    def test_an_error_of_the_body_is_not_hidden_by_one_of_the_clean_up(self) -> None:
        def fail() -> None:
            with Part("stop"):
                raise ValueError("the first")

        self.assertRaises(ValueError, fail)
