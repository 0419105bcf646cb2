"""What passes the door of a driver, and what does not."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points

from testtools import TestCase

from drivers.cache.cacheddevices import Devices
from drivers.cache.cachegroup import Group
from drivers.door import door, is_guarded
from drivers.errors import BadName, DiskFull, DriverError, HostFailed, NoSpace
from drivers.needs import Needs


class Base:
    def inherited(self) -> None:
        raise OSError(errno.ENOMEM, "no memory")


@door
class Failing(Base):
    """Raises what it is given."""

    def __init__(self, error: Exception | None = None) -> None:
        if error:
            raise error

    def act(self, error: Exception | None = None) -> str:
        if error:
            raise error
        return self._helper()

    @contextmanager
    def within(self, first: Exception | None = None, last: Exception | None = None) -> Iterator[str]:
        if first:
            raise first
        try:
            yield self._helper()
        finally:
            if last:
                raise last

    def _helper(self) -> str:
        return "done"


@door
class Lacking:
    """Needs a module that no kernel has."""

    needs = Needs(modules=("virtman_has_no_such_module",))

    def act(self) -> None:
        raise AssertionError("it was called")

    def close(self) -> str:
        return "closed"


class _NeedsUnread:
    """Of a host on which nobody can look."""

    @property
    def modules(self) -> tuple[str, ...]:
        raise OSError(errno.EMFILE, "too many open files")


@door
class Unread:
    """Cannot tell whether what it needs is there."""

    needs = _NeedsUnread()

    def act(self) -> None:
        raise AssertionError("it was called")


class ErrorsTest(TestCase):
    def test_what_the_machine_refuses_is_an_error_of_the_driver(self) -> None:
        refused = OSError(errno.EMFILE, "too many open files")
        error = self.assertRaises(HostFailed, Failing().act, refused)
        self.assertEqual((errno.EMFILE, refused), (error.errno, error.__cause__))
        self.assertIn("too many open files", str(error))

    def test_a_full_disk_is_no_space(self) -> None:
        for number in (errno.ENOSPC, errno.EDQUOT):
            error = self.assertRaises(DiskFull, Failing().act, OSError(number, "full", "/var/lib/file"))
            self.assertIsInstance(error, NoSpace)
            self.assertIn("/var/lib/file", str(error))

    def test_the_constructor_and_inherited_calls_have_the_same_door(self) -> None:
        self.assertRaises(HostFailed, Failing, PermissionError(errno.EACCES, "not you"))
        self.assertRaises(HostFailed, Failing().inherited)

    def test_a_context_has_a_door_at_both_ends(self) -> None:
        refused = OSError(errno.EMFILE, "too many open files")
        self.assertRaises(HostFailed, Failing().within(refused).__enter__)
        context = Failing().within(last=refused)
        self.assertEqual("done", context.__enter__())
        self.assertRaises(HostFailed, context.__exit__, None, None, None)

    def test_what_is_raised_within_a_context_passes(self) -> None:
        def meet(error: Exception) -> None:
            with Failing().within():
                raise error

        for error in (FileNotFoundError("the caller's"), KeyError("a defect"), BadName("/")):
            self.assertIs(error, self.assertRaises(type(error), meet, error))

    def test_all_else_passes(self) -> None:
        self.assertEqual("done", Failing().act())
        self.assertRaises(BadName, Failing().act, BadName("/"))
        self.assertRaises(KeyError, Failing().act, KeyError("a defect"))


class ModulesTest(TestCase):
    def test_a_driver_without_its_module_says_which_it_is(self) -> None:
        driver = Lacking()
        for _ in range(2):  # also when it is asked again
            error = self.assertRaises(DriverError, driver.act)
            self.assertIn("virtman_has_no_such_module", str(error))

    def test_a_host_that_cannot_be_looked_at_is_an_error_of_the_driver(self) -> None:
        self.assertEqual(errno.EMFILE, self.assertRaises(HostFailed, Unread().act).errno)

    def test_closing_needs_nothing(self) -> None:
        self.assertEqual("closed", Lacking().close())


class OwnDriversTest(TestCase):
    def test_every_public_call_of_every_driver_goes_through_the_door(self) -> None:
        layers = ("source", "attach", "cache", "export", "snapshot")
        points = [point for layer in layers for point in entry_points(group=f"virtman.drivers.{layer}")]
        open_calls = [
            f"{driver.__name__}.{name}"
            for driver in (*(point.load() for point in points), Group, Devices)
            for name, call in inspect.getmembers(driver, inspect.isfunction)
            if (name == "__init__" or not name.startswith("_")) and not is_guarded(call)
        ]
        self.assertEqual([], open_calls)
