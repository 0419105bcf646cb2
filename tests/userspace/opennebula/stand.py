"""What the tests of the OpenNebula stand share: a front end with two hosts, and a driver that notes its calls."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import testtools

from lab.opennebula import Driver, Frontend, Host, Oned, driver_of, one_source

PROBE = """#!/usr/bin/python3
import json, os, sys
from pathlib import Path
name = Path(sys.argv[0]).name
told = {"name": name, "words": sys.argv[1:], "stdin": sys.stdin.read(), "environment": dict(os.environ)}
notes = Path(os.environ["ONE_LOCATION"]) / "var" / "notes"
with notes.open("a") as file:
    file.write(json.dumps(told) + "\\n")
answer = Path(sys.argv[0]).with_name("answers") / name
if answer.exists():
    os.execv("/bin/sh", ["/bin/sh", str(answer), *sys.argv[1:]])
"""
TM_SCRIPTS = [
    "clone",
    "ln",
    "mv",
    "mvds",
    "delete",
    "cpds",
    "resize",
    "snap_create",
    "snap_create_live",
    "snap_delete",
    "snap_revert",
    "premigrate",
    "postmigrate",
    "failmigrate",
    "mkimage",
    "mkswap",
    "context",
    "prebackup",
    "prebackup_live",
    "postbackup",
    "postbackup_live",
    "restore",
    "monitor",
]
DATASTORE_SCRIPTS = ["cp", "mkfs", "clone", "rm", "stat", "monitor", "snap_delete", "snap_revert", "snap_flatten"]


class Noted(dict[str, object]):
    """One call of a script of the probe driver."""

    @property
    def line(self) -> str:
        """The script's name and arguments."""
        words = self["words"]
        assert isinstance(words, list)
        return " ".join([str(self["name"]), *words])


class Probe:
    """A driver whose scripts note how they are called, and answer what a test tells them to."""

    def __init__(self, frontend: Frontend, name: str = "probe") -> None:
        self.frontend = frontend
        self._folders = [frontend.remotes / kind / name for kind in ("tm", "datastore")]
        for folder, scripts in zip(self._folders, (TM_SCRIPTS, DATASTORE_SCRIPTS), strict=True):
            (folder / "answers").mkdir(parents=True)
            for script in scripts:
                (folder / script).write_text(PROBE)
                (folder / script).chmod(0o755)

    def answers(self, script: str, body: str) -> None:
        """Let a script of either kind run a body for the shell."""
        for folder in self._folders:
            (folder / "answers" / script).write_text(body)

    def calls(self) -> list[Noted]:
        """The calls so far."""
        notes = self.frontend.location / "var" / "notes"
        return [Noted(json.loads(line)) for line in notes.read_text().splitlines()] if notes.exists() else []

    def lines(self) -> list[str]:
        """Names and arguments of the calls so far."""
        return [call.line for call in self.calls()]


class StandTestCase(testtools.TestCase):
    """A test with a front end and two hosts of its own, and OpenNebula's drivers of ``kind``."""

    kind = "python"
    hosts: tuple[str, ...] = ("host-1", "host-2")
    real_files = False
    """Whether OpenNebula's own files lie on the front end."""

    def setUp(self) -> None:
        """Start the stand."""
        super().setUp()
        if os.geteuid() != 0:
            self.skipTest("hosts are mount namespaces: needs root")
        self.folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="vm-"))
        self.addCleanup(shutil.rmtree, self.folder)
        source = one_source() if self.kind == "ruby" or self.real_files else None
        if source is None and (self.kind == "ruby" or self.real_files):
            self.skipTest("ONE_SOURCE does not name OpenNebula's source tree")
        hosts = {name: Host(private=(self.folder / "private" / name,)) for name in self.hosts}
        self.frontend = Frontend(self.folder / "stand", hosts, source=source)
        self.frontend.__enter__()
        self.addCleanup(self.frontend.stop)
        self.probe = Probe(self.frontend)
        self.driver: Driver = driver_of(self.frontend, self.kind)
        self.driver.__enter__()
        self.addCleanup(self.driver.stop)
        self.one = Oned(self.frontend, self.driver)
        self.datastores = str(self.frontend.datastores())

    def note(self, name: str, content: str) -> Path:
        """A file of the test's own."""
        path = self.folder / name
        path.write_text(content)
        return path


WITH_SOURCE = one_source() is not None
"""Whether the tests run through OpenNebula's own programs, too."""
