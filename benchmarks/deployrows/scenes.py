"""Hosts in network namespaces, and whole images on their way to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.errors import Failed, TookTooLong
from benchmarks.figures import percentile
from benchmarks.hosts import started_cluster
from benchmarks.processes import say
from lab.cluster import Cluster, network_names
from lab.network import Network
from lab.process import attempts, kill_and_wait, processes_of
from virtman.client import AgentClient
from virtman.errors import CoordinatorDown, UnknownImage
from volt.client import Deployment

Look = Callable[[Deployment], None]
IMAGE = "img"
GONE_LIMIT = 120.0
"""Seconds that hosts get to let go of an image."""


@dataclass(frozen=True)
class Net:
    """``rate``: bits a second of each link. ``round_trip``: seconds. ``slow``: hosts whose links have a tenth of it.

    ``racks``: by host, its rack, which is its site as well; all others are in a site with the origin.
    """

    rate: int
    round_trip: float = 0.0
    loss: float = 0.0
    slow: Sequence[str] = ()
    racks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """One deployment. ``seconds`` until Volt knows that all are whole; ``floor``: of the image through one link once.

    ``sent``: bytes that the origin's link carried out, with all headers. ``each``: the seconds of each host.
    """

    method: str
    hosts: int
    size: int
    seconds: float
    floor: float
    sent: int
    each: Mapping[str, float]
    predicted: Mapping[str, float]

    @property
    def median(self) -> float:
        """Seconds of the host in the middle."""
        return percentile(list(self.each.values()), 50)

    def cells(self) -> list[str]:
        """For people."""
        times = f"{self.seconds / self.floor:.2f}"
        return [self.method, str(self.hosts), f"{self.seconds:.1f} s", times, f"{self.sent / self.size:.3f}"]


COLUMNS = ("method", "hosts", "time", "times the floor", "sent by the source, times the image")


@dataclass(frozen=True)
class Scene:
    """A cluster that runs, with an image at its origin, whose first bytes are ``image``'s."""

    net: Net
    network: Network
    cluster: Cluster
    image: Path

    @property
    def origin(self) -> AgentClient:
        return self.cluster.agents[0]

    def deploy(self, method: str, look: Look | None = None, lost: str = "", **more: Any) -> Figures:
        """Deploy the image to all hosts, which have nothing of it. Raises Failed.

        ``look`` is called with the deployment, again and again. ``lost``: a host that need not get the image.
        """
        size, hosts = self.image.stat().st_size, len(self.cluster.names) - 1
        before, begun = self.network.sent_bytes("origin"), time.monotonic()
        made = self.origin.deploy({"image": IMAGE, "everywhere": True, "method": method, "encrypt": False, **more})
        ended = self.origin.follow_deployment(made.id, look=look)
        seconds = max(_each(ended).values(), default=0.0) if lost else time.monotonic() - begun
        failed = [host for host in ended.hosts if host.state != "whole" and host.host != lost]
        if failed:
            raise Failed(f"{method}, {hosts} hosts: {'; '.join(f'{each.host}: {each.state}' for each in failed)}")
        floor = size * 8 / self.net.rate
        return Figures(
            ended.method, hosts, size, seconds, floor, self.network.sent_bytes("origin") - before, _each(ended),
            ended.predicted,
        )  # fmt: skip

    def race(self, method: str, within: float, **more: Any) -> Figures:
        """``deploy``, which is ended after so many seconds. Raises Failed, TookTooLong."""
        begun = time.monotonic()

        def look(now: Deployment) -> None:
            if time.monotonic() - begun > within and not now.ended:
                self.origin.cancel_deployment(now.id)
                raise TookTooLong(f"{method} takes more than {within:.0f} s")

        return self.deploy(method, look, **more)

    def lose(self, method: str, host: str, **more: Any) -> Figures:
        """``deploy``, while all of a host is killed that has half of the image. Raises Failed.

        The time is that until the last of the other hosts has the image.
        """
        number = self.cluster.names.index(host)
        killed = False

        def look(now: Deployment) -> None:
            nonlocal killed
            [its] = [each for each in now.hosts if each.host == host]
            if not killed and its.done > now.size // 2:
                self.cluster.kill_agent(number)
                for pid in processes_of(self.cluster.run_folder(number)):
                    kill_and_wait(pid)
                killed = True

        found = self.deploy(method, look, host, **more)
        if not killed:
            raise Failed(f"{method}: {host} was not killed")
        self.cluster.restart_agent(number)
        return found

    def let_go(self) -> None:
        """Have all hosts forget the image. Raises TookTooLong."""
        hosts = self.cluster.agents[1:]
        for host in hosts:
            with suppress(UnknownImage):
                host.end_hydration(IMAGE)
        for _ in attempts(GONE_LIMIT):
            for host in reversed(hosts):  # a host goes after its children
                with suppress(CoordinatorDown):  # where packets are lost
                    host.gc()
            if not any(host.status().images for host in hosts):
                return
        raise TookTooLong(f"hosts have not let go of the image after {GONE_LIMIT:.0f} s")

    def all_methods(self, methods: Sequence[str], **more: Any) -> Iterator[Figures]:
        """One deployment by each method, to hosts that have nothing."""
        for method in methods:
            found = self.deploy(method, **more)
            say(", ".join(found.cells()))
            yield found
            self.let_go()


def _each(ended: Deployment) -> dict[str, float]:
    whole = [host for host in ended.hosts if host.state == "whole" and host.host != "origin"]
    return {host.host: host.seconds for host in whole if host.seconds}


@contextmanager
def scene(hosts: int, net: Net, image: Path, leftovers: list[str]) -> Iterator[Scene]:
    """A cluster of an origin with the image and fresh hosts. Raises NoNetwork and others."""
    names = network_names(hosts + 1)
    rates = dict.fromkeys(net.slow, net.rate // 10)
    places = {name: f"{net.racks.get(name, 'home')}/1" for name in names[1:]} if net.racks else {}
    network = Network(
        names, rate=net.rate, round_trip=net.round_trip, loss=net.loss, rates=rates, racks=net.racks
    )  # fmt: skip
    with network, started_cluster("deploy", hosts, 2, leftovers, network, places) as cluster:
        cluster.agents[0].publish(IMAGE, image)
        yield Scene(net, network, cluster, image)
