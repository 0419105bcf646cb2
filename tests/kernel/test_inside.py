"""The tests of single drivers: they run in a guest, where the drivers find a real kernel."""

from __future__ import annotations

import base64
from pathlib import Path

from lab.tools import CHECKOUT
from tests.kernel.machines import KernelCase

INSIDE = Path(__file__).parent / "inside"
TIMEOUT = 600.0


class InsideTest(KernelCase):
    """One test for each file below ``inside``."""

    def run_inside(self, file: str) -> None:
        """Raises CommandFailed with pytest's output. The lines that ran are counted with those of the other tests."""
        data = f"/run/coverage.{file}"
        measured = ["python3", "-W", "error", "-m", "coverage", "run", "--source=drivers", f"--data-file={data}"]
        command = [*measured, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"kernel/inside/{file}"]
        self.host.run(["env", "-C", "/opt/virtman/tests", "PYTHONPATH=/opt/virtman", *command], timeout=TIMEOUT)
        (CHECKOUT / f".coverage.kernel.{file}").write_bytes(base64.b64decode(self.host.run(["base64", data])))

    def test_dmthin(self) -> None:
        self.run_inside("test_dmthin.py")

    def test_lio(self) -> None:
        self.run_inside("test_lio.py")

    def test_iscsi(self) -> None:
        self.run_inside("test_iscsi.py")

    def test_bcache(self) -> None:
        self.run_inside("test_bcache.py")

    def test_dmcache(self) -> None:
        self.run_inside("test_dmcache.py")

    def test_dmsnapshot(self) -> None:
        self.run_inside("test_dmsnapshot.py")
