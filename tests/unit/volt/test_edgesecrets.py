"""The secrets of edges."""

from __future__ import annotations

from testtools import TestCase

from volt.edgesecrets import edge_secret

KEY = bytes(range(32))


class EdgeSecret(TestCase):
    """`edge_secret`."""

    def test_everything_about_an_edge_counts(self) -> None:
        edges = [
            (KEY, "image", "a", "b"),
            (KEY[::-1], "image", "a", "b"),
            (KEY, "other", "a", "b"),
            (KEY, "image", "b", "a"),
            (KEY, "image", "a", "c"),
            (KEY, "imagea", "", "b"),
            (KEY, "image", "a,b", ""),
            (KEY, "image", 'a", "b', ""),
        ]
        self.assertEqual(len(edges), len({edge_secret(*edge) for edge in edges}))
