"""The exception tree and the problem types of the local API."""

from __future__ import annotations

import inspect

from testtools import TestCase
from testtools.matchers import Contains

from virtman import errors
from virtman.errors import BY_KIND, VirtmanError


class ErrorTreeTest(TestCase):
    def classes(self) -> list[type[VirtmanError]]:
        members = inspect.getmembers(errors, inspect.isclass)
        return [cls for _, cls in members if issubclass(cls, VirtmanError)]

    def test_every_error_is_found_by_its_own_kind(self) -> None:
        self.assertEqual({cls.kind: cls for cls in self.classes()}, BY_KIND)

    def test_every_error_is_drawn_in_the_tree(self) -> None:
        for cls in self.classes():
            self.assertThat(errors.__doc__, Contains(cls.__name__))

    def test_every_status_is_an_error_of_http(self) -> None:
        for cls in self.classes():
            self.assertTrue(400 <= cls.status < 600, cls)
