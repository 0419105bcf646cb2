"""The lab's cluster: what it starts, it stops."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab.cluster import Cluster
from lab.errors import Leftovers, NotReady
from lab.process import attempts, processes_of
from tests.boot.vms import VmTestCase
from tests.patience import PATIENCE

pytestmark = pytest.mark.long


class ClusterTest(VmTestCase):
    def test_a_process_that_outlives_its_agent_is_an_error_and_is_ended(self) -> None:
        cluster = Cluster(self.folder / "c", 1)
        cluster.start()
        stray = subprocess.Popen(
            ["tail", "-f", "/dev/null", f"{cluster.run_folder(0)}/agent.log"], stderr=subprocess.DEVNULL
        )
        self.addCleanup(stray.wait)
        self.addCleanup(stray.kill)
        error = self.assertRaises(Leftovers, cluster.stop)
        self.assertIn(str(stray.pid), str(error))
        self.assertEqual(-signal.SIGKILL, stray.wait(PATIENCE))

    def test_a_start_that_fails_half_way_leaves_nothing(self) -> None:
        cluster = Cluster(self.folder / "c", 2, agent_options=["--no-such-option"])
        error = self.assertRaises(NotReady, cluster.__enter__)
        self.assertIn("no-such-option", str(error))
        self.assertEqual({}, processes_of(cluster.run_folder(0).parent))


class LabUpTest(VmTestCase):
    def test_sigterm_ends_the_cluster_in_the_foreground_and_all_its_processes(self) -> None:
        log = self.folder / "out"
        with log.open("w") as output:
            # In the folder of the checkout, like a person.
            lab = subprocess.Popen([sys.executable, "-m", "lab", "up", "--hosts", "1"], stdout=output, stderr=output)
        self.addCleanup(lab.wait)
        self.addCleanup(lab.kill)
        for _ in attempts(PATIENCE):
            if "Ctrl-C stops" in log.read_text() or lab.poll() is not None:
                break
        [socket] = {word for word in log.read_text().split() if word.endswith("h0/agent.sock")}
        run_folder = Path(socket).parent.parent
        self.assertNotEqual({}, processes_of(run_folder))
        lab.terminate()
        self.assertEqual(0, lab.wait(PATIENCE), log.read_text())
        self.assertEqual({}, processes_of(run_folder))
        self.assertFalse(run_folder.exists())
