"""No order of events makes a loop of data, an unbalanced tree, or more changes than one death is worth."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.volt.simulation import Cluster, Lists
from volt.models import NodeState

HOSTS = st.integers(1, 16).map("h{}".format)
WHICH = st.integers(0, 1000)


class AnyOrder(RuleBasedStateMachine):
    """Joins, leaves, evictions, returns, moves, reports, and messages that are late or never come."""

    cluster: Cluster

    @initialize(fanout=st.integers(1, 3), hosts=st.integers(0, 16))
    def start(self, fanout: int, hosts: int) -> None:
        self.cluster = Cluster(fanout)
        for number in range(1, hosts + 1):
            self.cluster.join(f"h{number}")
        self.cluster.settle()

    def _changes(self, change: Any, *arguments: Any) -> int:
        """Do it; what it changed must be stamped, and nothing else. Returns how many nodes got other parents."""
        tree = self.cluster.tree
        before, stamps = self.cluster.lists(), {host: node.revision for host, node in tree.hosts.items()}
        change(*arguments)
        after: Lists = self.cluster.lists()
        for host, node in tree.hosts.items():
            if before.get(host) != after[host]:
                assert node.revision > stamps.get(host, -1)
        return sum(host in after and after[host][0] != old[0] for host, old in before.items())

    def _pick(self, which: int) -> str:
        return self.cluster.members[which % len(self.cluster.members)]

    def _members(self) -> bool:
        return bool(self.cluster.members)

    @rule(host=HOSTS)
    def join(self, host: str) -> None:
        self._changes(self.cluster.join, host)

    @precondition(_members)
    @rule(which=WHICH)
    def evict(self, which: int) -> None:
        fanout = self.cluster.tree.fanout
        returning = sum(node.returned is not None for node in self.cluster.tree.hosts.values())
        moved = self._changes(self.cluster.tree.leave, self._pick(which))
        assert moved <= 1 + 2 * fanout * fanout + returning * (1 + 2 * fanout * fanout)

    @precondition(_members)
    @rule(which=WHICH)
    def leave(self, which: int) -> None:
        self._changes(self.cluster.leave, self._pick(which))

    @rule(which=WHICH)
    def heartbeat(self, which: int) -> None:
        hosts = list(self.cluster.tree.hosts)
        self.cluster.ask(hosts[which % len(hosts)])

    @precondition(lambda self: self.cluster.answers)
    @rule(which=WHICH)
    def deliver_answer(self, which: int) -> None:
        self.cluster.deliver_answer(which)

    @rule(host=HOSTS)
    def send_confirmation(self, host: str) -> None:
        self.cluster.send_confirmation(host)

    @precondition(lambda self: self.cluster.confirmations)
    @rule(which=WHICH)
    def deliver_confirmation(self, which: int) -> None:
        self._changes(self.cluster.deliver_confirmation, which)

    @precondition(_members)
    @rule(which=WHICH, parent=WHICH)
    def report(self, which: int, parent: int) -> None:
        reporter = self._pick(which)
        parents = self.cluster.tree.parents(self.cluster.tree.hosts[reporter])
        self._changes(self.cluster.tree.suspect, reporter, parents[parent % len(parents)])

    @precondition(lambda self: len(self.cluster.tree.origins) < 3)
    @rule(host=HOSTS)
    def publish(self, host: str) -> None:
        if host not in self.cluster.tree.hosts:
            self._changes(self.cluster.publish, host)

    @rule(which=WHICH)
    def lose_origin(self, which: int) -> None:
        origins = [origin for origin in self.cluster.tree.origins if origin.state is not NodeState.LOST]
        if origins:
            self._changes(self.cluster.tree.lose, origins[which % len(origins)].host)

    @precondition(lambda self: len(self.cluster.tree.origins) > 1)
    @rule(which=WHICH)
    def remove_origin(self, which: int) -> None:
        origins = self.cluster.tree.origins
        self._changes(self.cluster.tree.leave, origins[which % len(origins)].host)

    @invariant()
    def holds(self) -> None:
        self.cluster.check()

    def teardown(self) -> None:
        """Once everybody has heard everything, each host but a dead one is offered and reads from its heap parent."""
        if not hasattr(self, "cluster"):
            return
        self.cluster.settle()
        tree = self.cluster.tree
        assert {node.state for node in tree.hosts.values()} == {NodeState.READY}
        for host in self.cluster.members:
            node = tree.hosts[host]
            assert tree.parents(node)[0] == tree.slots[(node.slot - 1) // tree.fanout].host
        self.cluster.check()


AnyOrder.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase
