"""Who reads from whom."""

from __future__ import annotations

from testtools import TestCase

from benchmarks.hosts import parents_in_use, places, unsettled_hosts
from benchmarks.misses import Place
from virtman.models import Route, Stack
from volt.client import ImageTree, NodeState, TreeNode


def node(host: str, parent: str | None, *children: TreeNode, state: NodeState = NodeState.READY) -> TreeNode:
    return TreeNode(
        host=host, slot=0, state=state, depth=0, revision=1, confirmed=1, fetched_bytes=0, parent=parent,
        children=list(children),
    )  # fmt: skip


def stack(**paths: str) -> Stack:
    """What a host says of an image, with the state of the path to each parent."""
    routes = [Route(host=host, address="unix:///x", state=state) for host, state in paths.items()]
    return Stack(
        name="i", role="host", phase="attached", serving=True, slot=1, size=512, fetched_bytes=0, cache_file_bytes=0,
        cache_hit_bytes=0, paths=routes, children=[], vms=[],
    )  # fmt: skip


def unsettled(root: TreeNode) -> list[str]:
    tree = ImageTree(image="i", size=512, digest="d", revision=1, fanout=2, root=root, origins=[])
    return unsettled_hosts(tree)


class PlacesTest(TestCase):
    def test_the_active_path_tells_the_parent(self) -> None:
        statuses = {"a": stack(x="standby", origin="active"), "b": stack(a="lost")}
        self.assertEqual({"a": "origin"}, parents_in_use(statuses))

    def test_depth_is_counted_from_the_origin(self) -> None:
        found = places({"c": "b", "a": "origin", "b": "a"})
        self.assertEqual({"a": Place("origin", 1), "b": Place("a", 2), "c": Place("b", 3)}, found)


class SettledTest(TestCase):
    def test_hosts_that_read_from_their_primary_parents_are_settled(self) -> None:
        self.assertEqual([], unsettled(node("origin", None, node("a", "origin", node("b", "a")))))

    def test_a_host_that_reads_from_an_alternate_is_not(self) -> None:
        self.assertEqual(["b"], unsettled(node("origin", None, node("a", "origin", node("b", "origin")))))

    def test_a_host_that_is_not_ready_is_not(self) -> None:
        self.assertEqual(["a"], unsettled(node("origin", None, node("a", "origin", state=NodeState.SUSPECT))))
