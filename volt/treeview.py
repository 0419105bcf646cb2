"""An image's tree for a terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.tree import Tree

from volt.models import ImageTree, NodeState, TreeNode
from volt.text import size_text

COLOURS = {
    NodeState.JOINING: "cyan",
    NodeState.READY: "green",
    NodeState.MOVING: "yellow",
    NodeState.RETURNING: "yellow",
    NodeState.SUSPECT: "red",
    NodeState.LOST: "red",
    NodeState.UNKNOWN: "magenta",
}


def render(tree: ImageTree, note: str = "") -> Tree:
    """The tree with the origin as its root: one line per host with state, depth, slot and bytes fetched.

    ``note``: what else there is to say of the image.
    """
    size = size_text(tree.size)
    drawn = Tree(f"[bold]{escape(tree.image)}[/] {size}, fanout {tree.fanout}, revision {tree.revision}{note}")
    waiting = [(drawn, node) for node in [tree.root, *tree.origins]]
    for branch, node in waiting:
        grown = branch.add(_line(node))
        waiting.extend((grown, child) for child in node.children)
    return drawn


def _line(node: TreeNode) -> str:
    place = f" in {escape(node.place)}" if node.place else ""
    state = f"[{COLOURS[node.state]}]{node.state}[/]"
    if node.slot <= 0:
        return f"[bold]{escape(node.host)}[/]{place} origin {state}"
    source = f" from {escape(node.parent)}" if node.parent else ""
    fetched = f"{size_text(node.fetched_bytes)}, whole" if node.whole else size_text(node.fetched_bytes)
    return f"[bold]{escape(node.host)}[/]{place} {state} depth {node.depth} slot {node.slot}, {fetched}{source}"
