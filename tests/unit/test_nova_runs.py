"""How long the runner of Nova's tests waits for them."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from testtools import TestCase

from tests.openstack.__main__ import end_of
from tests.patience import PATIENCE
from tests.unit.virtman.scene import folder_for


class Going:
    """A process whose tests end one by one, and not before each look; and the time that this takes."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.looks = 30
        self.now = 0.0
        self.killed = False

    def wait(self, timeout: float) -> int:
        if not self.looks:
            return 0
        self.looks -= 1
        self.now += timeout
        if self.looks % 3 == 0:
            with self.results.open("a") as file:
                file.write("{}\n")
        raise subprocess.TimeoutExpired("tests", timeout)

    def kill(self) -> None:
        self.killed = True


class EndTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.results = folder_for(self) / "results.json"

    def test_tests_that_go_on_are_waited_for_however_long_all_take(self) -> None:
        going: Any = Going(self.results)
        self.assertEqual(0, end_of(going, self.results, patience=5, again=2, clock=lambda: going.now))
        self.assertFalse(going.killed)

    def test_a_process_in_which_nothing_ends_is_killed(self) -> None:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(end_of, process, self.results, patience=0.1, again=0.01)
            try:
                self.assertEqual(-9, ended.result(PATIENCE))
            finally:
                process.kill()  # else the pool would wait
