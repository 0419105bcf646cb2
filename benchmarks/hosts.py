"""The lab's cluster as the benchmarks use it: one that leaves nothing, who reads from whom, and the chunk stores."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from benchmarks.errors import TookTooLong
from benchmarks.misses import Place
from benchmarks.processes import say
from lab.cluster import Cluster
from lab.errors import Leftovers
from lab.network import Network
from lab.process import attempts, processes_of
from lab.tools import BUILD
from virtman.client import AgentClient
from virtman.models import Stack
from volt.client import ImageTree, NodeState, TreeNode
from volt.errors import VoltUnreachable

SETTLE_LIMIT = 120.0
"""Seconds for all hosts of a tree to confirm their places."""

STATUS_AGE = 1.0
"""Seconds: more than what an agent tells of an image may be old (drivers/chunkstore/source.py, FRESH)."""


@contextlib.contextmanager
def started_cluster(
    name: str, hosts: int, fanout: int, leftovers: list[str], network: Network | None = None,
    places: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:  # fmt: skip
    """An origin and ``hosts`` hosts. What they kept is removed at the end, their logs only if all went well.

    ``places``: by host, its site and rack.

    What the cluster says when its end leaves something goes to ``leftovers``: the measurements before it are valid.
    """
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    say(f"starting Volt (fanout {fanout}) and {hosts + 1} agents; their logs are in {folder}")
    options = ["--fanout", str(fanout)]
    cluster = Cluster(folder, hosts + 1, volt_options=options, network=network, places=places)
    try:
        with cluster:
            yield cluster
            say("stopping the cluster")
        shutil.rmtree(folder)
    except Leftovers as error:
        say(f"the cluster left something; its logs are in {folder}")
        leftovers.append(str(error))
    finally:
        for kept in [*folder.glob("*/"), *folder.glob("*.raw")]:
            shutil.rmtree(kept) if kept.is_dir() else kept.unlink()


def host_status(cluster: Cluster, host: str, image: str) -> Stack:
    """What a host says of an image; the bytes fetched are counted at this moment."""
    [found] = [each for each in agent_of(cluster, host).status().images if each.name == image]
    return found


def agent_of(cluster: Cluster, host: str) -> AgentClient:
    """The client of a host's agent."""
    return cluster.agents[cluster.names.index(host)]


def image_status(cluster: Cluster, image: str) -> dict[str, Stack]:
    """``host_status`` of all hosts but the origin, by host."""
    hosts = cluster.names[1:]
    with ThreadPoolExecutor(16) as pool:
        return dict(zip(hosts, pool.map(lambda host: host_status(cluster, host, image), hosts), strict=True))


def parents_in_use(statuses: Mapping[str, Stack]) -> dict[str, str]:
    """Whom each host reads from, of those that have a parent."""
    return {host: path.host for host, status in statuses.items() for path in status.paths if path.state == "active"}


def places(parents: Mapping[str, str]) -> dict[str, Place]:
    """Where each host is, made of whom each host reads from."""

    def depth(host: str) -> int:
        return 1 + depth(parents[host]) if host in parents else 0

    return {host: Place(parent, depth(host)) for host, parent in parents.items()}


def settled_places(cluster: Cluster, image: str) -> dict[str, Place]:
    """Where each host is, once all have confirmed their places and read from their primary parents.

    Raises TookTooLong.
    """
    unsettled = ["Volt"]
    for _ in attempts(SETTLE_LIMIT):
        with contextlib.suppress(VoltUnreachable):  # it may be busy with many hosts
            unsettled = unsettled_hosts(cluster.volt.tree(image))
        if not unsettled:
            return places(parents_in_use(image_status(cluster, image)))
    raise TookTooLong(
        f"after {SETTLE_LIMIT:.0f} s these hosts have not settled in their places: {', '.join(unsettled)}"
    )


def unsettled_hosts(tree: ImageTree) -> list[str]:
    """The hosts that are not ready or do not read from their primary parents."""
    waiting: list[tuple[str | None, TreeNode]] = [(None, tree.root)]
    for _, node in waiting:
        waiting += [(node.host, child) for child in node.children]
    return [node.host for parent, node in waiting if node.state is not NodeState.READY or node.parent != parent]


def chunk_store(cluster: Cluster, host: str) -> int:
    """The process id of a host's chunk store."""
    found = processes_of(cluster.run_folder(cluster.names.index(host)))
    [pid] = [pid for pid, line in found.items() if "virtman-chunkd" in line]
    return pid
