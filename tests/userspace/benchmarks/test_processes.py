"""What processes use, and how they are ended."""

from __future__ import annotations

import os
import shutil
import subprocess

from testtools import TestCase

from benchmarks import processes


class UsageTest(TestCase):
    def test_a_process_that_worked_has_used_time_and_memory(self) -> None:
        self.assertGreater(processes.cpu_seconds(os.getpid()), 0)
        used = processes.memory(os.getpid())
        self.assertGreater(used["rss"], 1 << 20)
        self.assertGreaterEqual(used["rss"], used["pss"])

    def test_a_process_that_ended_uses_nothing(self) -> None:
        ended = subprocess.Popen(["true"])
        ended.wait()
        self.assertEqual(0, processes.cpu_seconds(ended.pid))
        self.assertEqual({"rss": 0, "pss": 0}, processes.memory(ended.pid))
        self.assertEqual(0, processes.file_bytes_read(ended.pid))


class ProcessTest(TestCase):
    def test_a_running_program_is_ended_with_its_block(self) -> None:
        if shutil.which("qemu-storage-daemon") is None:
            self.skipTest("needs qemu-storage-daemon of Debian package qemu-system-common")
        with processes.running(["qemu-storage-daemon"]) as process:
            self.assertIsNone(process.poll())
        self.assertIsNotNone(process.poll())
