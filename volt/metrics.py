"""Numbers for Prometheus: counters that the coordinator and the API drive, gauges read from the store when asked."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import func, select

from volt.models import HostState
from volt.store import HostRow, ImageRow, Store, node_table
from volt.tree import deepest


class Metrics:
    """The numbers of one Volt."""

    def __init__(self, store: Store) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(StoreCollector(store))
        self.heartbeats = Counter("volt_heartbeats", "Heartbeats received", registry=self.registry)
        self.reports = Counter("volt_reports", "Reports of dead parents received", registry=self.registry)
        self.moves = Counter("volt_moves", "Nodes moved into the place of another one", registry=self.registry)
        self.deaths = Counter(
            "volt_thread_deaths", "Faults that ended a thread, which began again", ["thread"], registry=self.registry
        )
        self.deaths.labels("leases")
        self.requests = Histogram(
            "volt_request_seconds",
            "Time to answer a request",
            ["method", "endpoint", "status"],
            registry=self.registry,
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)


class StoreCollector(Collector):
    """Gauges read from the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: the registry would read the store to find the names."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Hosts by state, nodes by image and state, depth by image."""
        hosts = GaugeMetricFamily("volt_hosts", "Registered hosts", labels=["state"])
        nodes = GaugeMetricFamily("volt_nodes", "Hosts in an image's tree", labels=["image", "state"])
        hops = GaugeMetricFamily("volt_tree_depth", "Hops from the deepest host to the origin", labels=["image"])
        n = node_table.c
        with self._store.read() as session:
            counted = dict(session.execute(select(HostRow.state, func.count()).group_by(HostRow.state)).all())
            for state in (HostState.ALIVE, HostState.LOST):
                hosts.add_metric([state], counted.get(state, 0))
            by_state = select(ImageRow.name, n.state, func.count()).join(node_table).group_by(ImageRow.name, n.state)
            for image, node_state, count in session.execute(by_state):
                nodes.add_metric([image, node_state], count)
            last = select(ImageRow, n.place, func.max(n.slot)).join(node_table).group_by(ImageRow.id, n.place)
            trees: dict[tuple[str, int, str], dict[str, int]] = {}
            for image, place, slot in session.execute(last):
                trees.setdefault((image.name, image.fanout, image.home), {})[place] = slot
            for (image, fanout, home), slots in trees.items():
                hops.add_metric([image], deepest(slots, fanout, home))
        yield from (hosts, nodes, hops)
