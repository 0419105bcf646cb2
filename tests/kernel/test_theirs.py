"""What somebody else has on a host stays as it is, whatever the agent does there."""

from __future__ import annotations

import difflib

import pytest

from lab.errors import CommandFailed
from tests.kernel.stacks import StackCase
from tests.kernel.theirs import Theirs

pytestmark = pytest.mark.long

SIZE = 2 << 20
FILL = "fallocate --length $(df --output=avail --block-size=1 /var/lib/virtman | tail -n 1) /var/tmp/ballast"


class TheirsTest(StackCase):
    def setUp(self) -> None:
        super().setUp()
        self.publish("image", SIZE)
        self.theirs = Theirs(self.host, self.origin)
        self.addCleanup(self.theirs.remove)
        self.theirs.make()
        self.before = self.theirs.look()

    def assert_untouched(self) -> None:
        changes = difflib.unified_diff(self.before, self.theirs.look(), "before", "after", n=0, lineterm="")
        self.assertEqual([], list(changes))

    def test_volume_groups_maps_sessions_targets_and_bcache_sets_of_others_are_left_alone(self) -> None:
        agent = self.agent(self.host)
        self.read(self.host, self.create(self.host, "vm", "image"), "image", SIZE)
        self.theirs.activate_again()
        self.assert_untouched()
        agent.repair()
        agent.suspend()
        self.assert_untouched()
        self.host.run(["systemctl", "restart", "virtman-agent.service"])
        agent.destroy("vm")
        agent.gc()
        self.assert_untouched()
        self.addCleanup(self.host.run, ["rm", "-f", "/var/tmp/ballast"])
        self.host.run(["sh", "-c", FILL])
        self.assertRaises(CommandFailed, self.host.run, ["virtman", "create", "vm", "image"])
        self.assert_untouched()
