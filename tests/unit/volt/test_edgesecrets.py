"""The secrets of edges."""

from __future__ import annotations

import hashlib
import hmac

from testtools import TestCase

from volt.edgesecrets import edge_secret

KEY = bytes(range(32))


class EdgeSecret(TestCase):
    """`edge_secret`."""

    def test_it_is_an_hmac_of_the_names_as_a_json_list(self) -> None:
        expected = hmac.digest(KEY, b'["image", "parent", "child"]', hashlib.sha256).hex()
        self.assertEqual(expected, edge_secret(KEY, "image", "parent", "child"))

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
