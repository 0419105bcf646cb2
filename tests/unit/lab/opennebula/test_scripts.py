"""The stand's programs for the shell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from testtools import TestCase

import lab.opennebula

FOLDER = Path(lab.opennebula.__file__).parent


class ScriptsTest(TestCase):
    def test_shellcheck_has_no_findings(self) -> None:
        if shutil.which("shellcheck") is None:
            self.skipTest("shellcheck is missing: install it (lab/packages)")
        scripts = [path for path in FOLDER.rglob("*") if path.is_file() and path.read_bytes().startswith(b"#!/bin/sh")]
        self.assertIn(FOLDER / "remotes" / "datastore" / "downloader.sh", scripts)
        done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
        self.assertEqual(0, done.returncode, done.stdout)
