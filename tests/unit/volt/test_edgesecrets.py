"""The secrets of edges."""

from __future__ import annotations

from testtools import TestCase

from volt.edgesecrets import edge_secret, serving_key, ticket

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


class TicketTest(TestCase):
    def test_everything_about_a_ticket_counts(self) -> None:
        keys = [serving_key(KEY, "image", "a"), serving_key(KEY, "other", "a"), serving_key(KEY, "image", "b")]
        tickets = {ticket(key, child, revision) for key in keys for child in ("c", "d") for revision in (1, 2)}
        self.assertEqual(12, len(tickets - {edge_secret(KEY, "serving", "image", "a")}))

    def test_it_is_that_of_the_chunk_store(self) -> None:
        expected = "4ed7ac4931a51fe1f4e7188b891d8dc8548be5cd901e968a32207f4908aebcd1"
        self.assertEqual(expected, ticket(KEY.hex(), "host-1", 17))
