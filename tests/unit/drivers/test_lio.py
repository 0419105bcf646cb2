"""Which failures of calls of the kernel's iSCSI target come of something that was just removed."""

from __future__ import annotations

import errno
from types import SimpleNamespace

from testtools import TestCase

from drivers.errors import TargetFailed
from drivers.export.lio import met_removal, not_in_configfs


class RemovalTest(TestCase):
    def test_what_is_not_in_configfs_is_known_by_the_name_that_either_release_of_rtslib_has_for_it(self) -> None:
        for name in ("RTSLibNotInCFS", "RTSLibNotInCFSError"):
            self.assertIs(LookupError, not_in_configfs(SimpleNamespace(**{name: LookupError})))

    def test_only_what_is_gone_from_the_kernel_was_removed(self) -> None:
        gone = "/sys/kernel/config/target/core/iblock_0/virtman-another"
        for path, met in ((gone, True), ("/var/lib/virtman/image", False)):
            cause = FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            error = TargetFailed(cause)
            error.__cause__ = cause
            self.assertEqual(met, met_removal(error))
        self.assertFalse(met_removal(TargetFailed(ValueError("refused"))))
