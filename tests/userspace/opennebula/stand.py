"""What the tests of the OpenNebula stand share: a front end with hosts, and OpenNebula's drivers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import testtools

from lab.opennebula import Driver, Frontend, Host, Oned, driver_of, one_source

WITH_SOURCE = one_source() is not None
"""Whether the tests run through OpenNebula's own programs, too."""


class StandTestCase(testtools.TestCase):
    """A test with a front end and hosts of its own, and OpenNebula's drivers of ``kind``."""

    kind = "python"
    folder: Path
    frontend: Frontend
    driver: Driver
    one: Oned

    def start_stand(self, folder: Path, hosts: Mapping[str, Host]) -> None:
        """Start the front end and the drivers in a folder."""
        self.folder = folder
        source = one_source() if self.kind == "ruby" else None
        self.frontend = Frontend(folder / "stand", hosts, source=source)
        self.frontend.__enter__()
        self.addCleanup(self.frontend.stop)
        self.install()
        self.driver = driver_of(self.frontend, self.kind)
        self.driver.__enter__()
        self.addCleanup(self.driver.stop)
        self.one = Oned(self.frontend, self.driver)

    def install(self) -> None:
        """Install on the front end what the drivers are to find when they start."""
