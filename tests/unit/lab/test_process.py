"""Processes of the lab: readiness, logs and ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import testtools

from lab.errors import CommandFailed, NotReady
from lab.process import Service, kill_and_wait, processes_of
from lab.tools import run


class ServiceTest(testtools.TestCase):
    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory(dir="/tmp")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def service(self, program: str) -> Service:
        """A Python program as a service."""
        argv = [sys.executable, "-c", program, f"{self.folder}/mark"]
        service = Service("it", argv, self.folder / "log")
        service.start()
        self.addCleanup(service.kill)
        return service

    def test_a_process_that_ends_too_early_is_reported_with_its_last_words(self) -> None:
        service = self.service("raise SystemExit('no port')")
        error = self.assertRaises(NotReady, service.wait_ready, lambda: False, 30)
        self.assertIn("no port", str(error))

    def test_waiting_ends_when_the_condition_is_true(self) -> None:
        service = self.service("print('up', flush=True); input_ = __import__('signal').pause()")
        service.wait_ready(lambda: "up" in service.log_file.read_text(), 30)
        self.assertTrue(service.running)
        service.stop()
        self.assertFalse(service.running)

    def test_processes_are_found_by_the_folder_they_were_given(self) -> None:
        service = self.service("print('up', flush=True); __import__('signal').pause()")
        # The kernel has no command line of a process in the middle of its exec.
        service.wait_ready(lambda: "up" in service.log_file.read_text(), 30)
        self.assertEqual([service.pid], list(processes_of(self.folder)))

    def test_a_process_of_others_is_killed_by_its_id(self) -> None:
        service = self.service("__import__('signal').pause()")
        kill_and_wait(service.pid)
        self.assertFalse(service.running)
        kill_and_wait(service.pid)


class RunTest(testtools.TestCase):
    def test_a_failure_carries_the_command_its_code_and_its_last_words(self) -> None:
        error = self.assertRaises(CommandFailed, run, [sys.executable, "-c", "import sys; sys.exit('no room')"])
        self.assertEqual(1, error.code)
        self.assertIn("no room", str(error))

    def test_input_reaches_the_tool(self) -> None:
        self.assertEqual("abc", run(["cat"], stdin="abc"))


class NamespaceScriptTest(testtools.TestCase):
    def test_the_scripts_are_valid_for_sh(self) -> None:
        for script in ("bootstrap", "install-extlinux", "libvirtd-private", "guest-root/usr/local/sbin/nocloud"):
            path = Path(__file__).parents[3] / "lab" / script
            self.assertEqual(0, subprocess.run(["sh", "-n", path], check=False).returncode, script)
