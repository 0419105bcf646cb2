"""The project as the lab's guests get it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import testtools

from lab.kernel.machine import compile_wheel


class WheelTest(testtools.TestCase):
    def test_byte_code_is_used_whatever_time_the_sources_get_when_they_are_unpacked(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        wheel, target = Path(folder.name) / "it.whl", Path(folder.name) / "target"
        with zipfile.ZipFile(wheel, "w") as packed:
            packed.writestr("package/module.py", "ANSWER = 42\n")
        compile_wheel(wheel, lambda folder: ["env", "-C", str(folder), sys.executable])
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(target)
        os.utime(target / "package/module.py", (1, 1))
        argv = [sys.executable, "-v", "-c", "import package.module"]
        said = subprocess.run(argv, cwd=target, capture_output=True, text=True, check=True)
        self.assertIn("module.cpython", said.stderr)
        self.assertNotIn("# wrote", said.stderr)
        self.assertEqual(["it.whl", "target"], sorted(path.name for path in Path(folder.name).iterdir()))
