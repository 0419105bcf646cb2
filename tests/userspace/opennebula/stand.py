"""What the tests of the OpenNebula stand share: a front end with two hosts, and OpenNebula's drivers."""

from __future__ import annotations

import testtools

from lab.opennebula import Driver, Frontend, Host, Oned, driver_of, one_source
from tests.programs import require_root
from tests.unit.virtman.scene import folder_for

WITH_SOURCE = one_source() is not None
"""Whether the tests run through OpenNebula's own programs, too."""


class StandTestCase(testtools.TestCase):
    """A test with a front end and two hosts of its own, and OpenNebula's drivers of ``kind``."""

    kind = "python"

    def setUp(self) -> None:
        """Start the stand."""
        super().setUp()
        require_root(self, "hosts are mount namespaces")
        self.folder = folder_for(self)
        hosts = {name: Host(private=(self.folder / "private" / name,)) for name in ("host-1", "host-2")}
        source = one_source() if self.kind == "ruby" else None
        self.frontend = Frontend(self.folder / "stand", hosts, source=source)
        self.frontend.__enter__()
        self.addCleanup(self.frontend.stop)
        self.driver: Driver = driver_of(self.frontend, self.kind)
        self.driver.__enter__()
        self.addCleanup(self.driver.stop)
        self.one = Oned(self.frontend, self.driver)
