"""The drawn tree, sizes, and the token file."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from rich.console import Console
from testtools import TestCase

from volt.client import ImageTree, NodeState, TreeNode
from volt.errors import VoltError
from volt.text import exact_size, size_text
from volt.tokens import read_token, token_matches
from volt.treeview import render


def node(host: str, slot: int, *children: TreeNode, state: NodeState = NodeState.READY) -> TreeNode:
    return TreeNode(
        host=host, slot=slot, state=state, depth=min(slot, 1), revision=3, confirmed=3, fetched_bytes=61_000_000,
        parent=None if slot <= 0 else "origin", children=list(children),
    )  # fmt: skip


class Drawing(TestCase):
    """`volt.treeview.render`."""

    def test_one_line_per_host_below_its_parent(self) -> None:
        root = node("origin", 0, node("h1", 1, node("h3", 3, state=NodeState.MOVING)), node("h2", 2))
        tree = ImageTree(
            image="debian-12", size=2**31, digest="", revision=9, fanout=2, root=root, origins=[node("second", -1)]
        )
        drawn = io.StringIO()
        Console(file=drawn, width=100).print(render(tree))
        self.assertEqual(
            [
                "debian-12 2G, fanout 2, revision 9",
                "├── origin origin ready",
                "│   ├── h1 ready depth 1 slot 1, 58.2M from origin",
                "│   │   └── h3 moving depth 1 slot 3, 58.2M from origin",
                "│   └── h2 ready depth 1 slot 2, 58.2M from origin",
                "└── second origin ready",
            ],
            [line.rstrip() for line in drawn.getvalue().splitlines()],
        )


class Sizes(TestCase):
    """`volt.text`."""

    def test_sizes_are_said_in_the_units_in_which_they_are_typed(self) -> None:
        for size, rounded, exact in (
            (None, "-", "-"),
            (0, "0B", "0 bytes"),
            (512, "512B", "512 bytes"),
            (1 << 20, "1M", "1M"),
            ((1 << 20) - 1, "1M", "1048575 bytes"),
            (3 << 29, "1.5G", "1536M"),
            (40 << 30, "40G", "40G"),
            (1 << 60, "1E", "1E"),
        ):
            self.assertEqual((rounded, exact), (size_text(size), exact_size(size)))


class Tokens(TestCase):
    """Reading and comparing."""

    def token(self, content: bytes, mode: int = 0o600) -> Path:
        file = self.enterContext(tempfile.NamedTemporaryFile(dir="/tmp"))
        file.write(content)
        file.flush()
        Path(file.name).chmod(mode)
        return Path(file.name)

    def test_white_space_around_it_does_not_count(self) -> None:
        self.assertEqual("secret", read_token(self.token(b" secret\n")))

    def test_files_that_hold_no_token(self) -> None:
        for content in (b"", b"\n", b"two words", b"two\nlines", b"\xff"):
            self.assertRaises(VoltError, read_token, self.token(content))
        self.assertRaises(VoltError, read_token, Path("/no/such/file"))

    def test_a_file_that_everybody_can_read(self) -> None:
        self.assertRaises(VoltError, read_token, self.token(b"secret", 0o604))

    def test_only_the_whole_token_matches(self) -> None:
        for sent in (None, "", "secret", "Bearer secre", "Bearer secret", "Bearer secret "):
            self.assertEqual(sent == "Bearer secret", token_matches(sent, "secret"), repr(sent))
