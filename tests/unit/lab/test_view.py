"""The tree as rows."""

from __future__ import annotations

import testtools

from lab.view import flatten
from volt.client import NodeState, TreeNode


def node(host: str, *children: TreeNode) -> TreeNode:
    """A node of a tree."""
    return TreeNode(
        host=host, slot=0, state=NodeState.READY, depth=0, revision=1, confirmed=1, fetched_bytes=0, parent=None,
        children=list(children),
    )  # fmt: skip


class FlattenTest(testtools.TestCase):
    def test_parents_stand_before_their_children(self) -> None:
        rows = flatten(node("origin", node("a", node("c")), node("b")))
        self.assertEqual([(0, "origin"), (1, "a"), (2, "c"), (1, "b")], [(depth, row.host) for depth, row in rows])
