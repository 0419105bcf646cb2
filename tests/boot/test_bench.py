"""The stages of a real VM's boot are timed."""

from __future__ import annotations

import pytest

from tests.boot.vms import VmTestCase
from tests.patience import PATIENCE
from virtman.bench import Boots, wave
from virtman.staging import STAGES


class BenchTest(VmTestCase):
    @pytest.mark.long
    def test_a_vm_is_timed_to_its_prompt_and_destroyed(self) -> None:
        client = self.cluster(2).agents[1]
        boots = Boots("guest", 1, {"memory": 256, "network": "none"}, "login:", PATIENCE)
        made = wave(client, boots, 1)
        [run] = made.runs
        self.assertEqual("", run.error)
        self.assertEqual([stage.name for stage in STAGES["boot"]], list(run.seconds))
        self.assertGreater(run.seconds["guest"], 0)
        self.assertEqual([], client.vms())
