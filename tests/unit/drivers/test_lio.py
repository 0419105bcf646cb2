"""How often the driver of the kernel's iSCSI target tries what failed because something was gone."""

from __future__ import annotations

import errno
from types import SimpleNamespace

from testtools import TestCase

from drivers.errors import TargetFailed
from drivers.export.lio import PAUSES, not_in_configfs, until_nothing_goes

GONE = "/sys/kernel/config/target/core/iblock_0/virtman-another"


def missing(path: str) -> TargetFailed:
    """What the driver raises when a file is not there."""
    cause = FileNotFoundError(errno.ENOENT, "No such file or directory", path)
    error = TargetFailed(cause)
    error.__cause__ = cause
    return error


class Walk:
    """Fails so many times at what is gone."""

    def __init__(self, failures: int, path: str = GONE) -> None:
        self.left, self.calls, self.path = failures, 0, path

    def __call__(self) -> str:
        self.calls += 1
        if self.left > 0:
            self.left -= 1
            raise missing(self.path)
        return "walked"


class NotInConfigfsTest(TestCase):
    def test_it_is_known_by_the_name_that_either_release_of_rtslib_has_for_it(self) -> None:
        for name in ("RTSLibNotInCFS", "RTSLibNotInCFSError"):
            self.assertIs(LookupError, not_in_configfs(SimpleNamespace(**{name: LookupError})))


class UntilNothingGoesTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.slept: list[float] = []

    def test_what_stays_missing_is_an_error_after_five_seconds_at_most(self) -> None:
        walk = Walk(1000)
        error = self.assertRaises(TargetFailed, until_nothing_goes, walk, self.slept.append)
        self.assertIn(GONE, str(error))
        self.assertEqual((len(PAUSES) + 1, list(PAUSES)), (walk.calls, self.slept))
        self.assertLess(sum(self.slept), 5.0)
        self.assertGreater(sum(self.slept), 3.0)  # to remove a target took 0.3 in a guest

    def test_a_file_that_is_not_the_kernels_is_not_waited_for(self) -> None:
        walk = Walk(1, "/var/lib/virtman/image")
        self.assertRaises(TargetFailed, until_nothing_goes, walk, self.slept.append)
        self.assertEqual((1, []), (walk.calls, self.slept))
