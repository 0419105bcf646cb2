"""Processes that outlive the agent: how they are started, found again and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from testtools import TestCase

from drivers.host import daemon
from tests.patience import PATIENCE
from tests.unit.virtman.scene import folder_for


class DaemonCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.log, self.pid_file = self.folder / "log", self.folder / "pid"

    def spawn(self, script: str, **environment: str) -> daemon.Daemon:
        started = daemon.spawn(["/bin/sh", "-c", script], {**os.environ, **environment}, [], self.log)
        self.addCleanup(started.stop)
        return started


class SpawnTest(DaemonCase):
    def test_what_is_handed_on_may_be_open_under_any_number(self) -> None:
        """Also each under the number that the other one is to have."""
        code = """if True:
            import os, sys
            from pathlib import Path
            from drivers.host import daemon
            first, second = daemon.FIRST_FILE, daemon.FIRST_FILE + 1
            files = [os.open(path, os.O_RDONLY) for path in sys.argv[1:3]]
            for fd, number in zip(files, (50, 51)):
                os.dup2(fd, number, inheritable=False)
            os.dup2(50, second, inheritable=False)
            os.dup2(51, first, inheritable=False)
            argv = ["/bin/sh", "-c", "cat /proc/self/fd/3 /proc/self/fd/4 >&2"]
            daemon.spawn(argv, os.environ, [second, first], Path(sys.argv[3])).ended(60)
        """
        for name in ("one", "two"):
            (self.folder / name).write_text(name)
        arguments = [str(self.folder / name) for name in ("one", "two", "said")]
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
        self.assertEqual("onetwo", (self.folder / "said").read_text())

    def test_nothing_else_is_handed_on(self) -> None:
        secret = os.open(os.devnull, os.O_RDONLY)
        self.addCleanup(os.close, secret)
        self.assertTrue(self.spawn(f"[ ! -e /proc/$$/fd/{secret} ] && echo none >&2").ended(PATIENCE))
        self.assertEqual("none", daemon.last_lines(self.log))

    def test_it_has_a_session_and_the_environment_of_its_own(self) -> None:
        started = self.spawn('echo "$WORD" $(ps -o sid= $$) >&2', WORD="word")
        self.assertTrue(started.ended(PATIENCE))
        self.assertEqual(f"word {started.pid}", daemon.last_lines(self.log))

    def test_one_that_has_ended_is_no_zombie_and_its_end_is_told(self) -> None:
        for script, ending in (("exit 3", "ended with exit code 3"), ("kill -KILL $$", "was killed by SIGKILL")):
            started = self.spawn(script)
            self.assertTrue(started.ended(PATIENCE))
            self.assertFalse(Path(f"/proc/{started.pid}").exists())
            self.assertEqual(ending, started.ending())

    def test_one_that_does_not_end_when_it_is_asked_is_killed(self) -> None:
        started = self.spawn("trap '' TERM; echo ready >&2; while :; do sleep 0.1; done")
        started.stop()
        self.assertTrue(started.ended())


class AdoptTest(DaemonCase):
    def setUp(self) -> None:
        super().setUp()
        self.started = self.spawn("exec sleep 600")

    def write(self, pid: int, began: int) -> None:
        self.pid_file.write_text(f"{pid} {began}\n")

    def began(self) -> int:
        stat = Path(f"/proc/{self.started.pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[19])

    def test_the_process_of_a_pid_file_is_found_and_can_be_stopped(self) -> None:
        self.write(self.started.pid, self.began())
        found = daemon.adopt(self.pid_file)
        assert found is not None
        self.assertEqual(self.started.pid, found.pid)
        found.stop()
        self.assertTrue(self.started.ended())

    def test_another_process_with_the_same_number_is_left_alone(self) -> None:
        self.write(self.started.pid, self.began() - 1)
        self.assertIsNone(daemon.adopt(self.pid_file))
        self.assertFalse(self.started.ended())

    def test_one_that_has_ended_is_not_found(self) -> None:
        self.write(self.started.pid, self.began())
        os.kill(self.started.pid, signal.SIGKILL)
        self.assertTrue(self.started.ended(PATIENCE))
        self.assertIsNone(daemon.adopt(self.pid_file))

    def test_without_a_whole_pid_file_nothing_is_found(self) -> None:
        self.assertIsNone(daemon.adopt(self.pid_file))
        for text in ("", "7", "seven 7"):
            self.pid_file.write_text(text)
            self.assertIsNone(daemon.adopt(self.pid_file))
