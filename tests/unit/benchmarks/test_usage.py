"""Sorting a cluster's processes by what they are."""

from __future__ import annotations

from testtools import TestCase

from benchmarks.usage import AGENTS, DAEMONS, VOLT, cpu_between, kind_of


class KindTest(TestCase):
    def test_processes_are_told_apart_by_their_command_lines(self) -> None:
        self.assertEqual(DAEMONS, kind_of("/usr/bin/qemu-storage-daemon --pidfile /tmp/h1/serve/agent.pid"))
        self.assertEqual(AGENTS, kind_of("/usr/bin/python3 /venv/bin/virtman agent --name h1 --run /tmp/h1"))
        self.assertEqual(VOLT, kind_of("/usr/bin/python3 -m volt.cli serve --state /tmp/volt"))
        self.assertIsNone(kind_of("/usr/bin/python3 -m virtman.cli create vm-1 image"))


class CpuTest(TestCase):
    def test_only_what_was_used_between_counts(self) -> None:
        self.assertEqual({"a": 1.5, "b": 2.0, "all": 3.5}, cpu_between({"a": 1.0}, {"a": 2.5, "b": 2.0}))
