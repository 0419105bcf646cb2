"""Servers that boot from a base and go to another host, or stay although they are asked to."""

from __future__ import annotations

from tests.openstack.computes import ComputesTest, ServerCase, sha256


class MoveTest(ServerCase):
    """One server."""

    def test_a_resize_that_is_reverted_goes_back_to_the_old_disk(self) -> None:
        self.write(self.server, b"before")
        self.act(self.server, {"migrate": None}, "VERIFY_RESIZE")
        self.write(self.server, b"after!")
        self.act(self.server, {"revertResize": None}, "ACTIVE")
        self.assertEqual(self.node, self.node_of(self.server))
        self.assertEqual(b"before", self.read(self.server)[:6])
        self.upkeep(self.other)  # Nova takes the hosts' folders for shared, and destroys nothing in them
        self.assertEqual({}, self.disks(self.other))

    def test_a_resize_whose_disk_cannot_be_sent_leaves_the_server_where_it_is(self) -> None:
        self.write(self.server, b"stays")
        self.ssh("echo no route to host >&2; exit 255")
        self.api.post_server_action(self.server["id"], {"migrate": None})
        self.soon(lambda: self.migrations() == ["error"])
        self.until(self.server, "ACTIVE")
        self.assertEqual(b"stays", self.read(self.server)[:5])
        self.assertEqual([self.server["id"]], self.all_disks())

    def test_a_live_migration_is_refused_before_anything_moves(self) -> None:
        body = {"os-migrateLive": {"host": None, "block_migration": "auto"}}
        self.api.post_server_action(self.server["id"], body)
        self.soon(lambda: self.migrations() == ["error"])
        self.assertEqual(self.node, self.node_of(self.until(self.server, "ACTIVE")))
        self.assertEqual({}, self.disks(self.other))

    def migrations(self) -> list[str]:
        """How far those of the server are."""
        found = self.admin_api.api_get("/os-migrations").body["migrations"]
        return [one["status"] for one in found if one["instance_uuid"] == self.server["id"]]

    def test_an_evacuated_server_begins_anew_at_another_host(self) -> None:
        self.write(self.server, b"lost")
        self.lose(self.node)
        self.api.post_server_action(self.server["id"], {"evacuate": {}})
        server = self.until(self.server, "SHUTOFF")
        self.assertEqual(self.other, self.node_of(server))
        self.assertEqual(sha256(self.content), sha256(self.read(server)))


class OneHostTest(ComputesTest):
    """A server that has nowhere to go."""

    COMPUTES = 1

    def test_a_resize_on_its_host_keeps_its_disk(self) -> None:
        self.flags(allow_resize_to_same_host=True)
        (node,) = self.cluster.names
        server = self.boot()
        self.write(server, b"stays")
        _, larger, *_ = self.api.get_flavors()
        self.act(server, {"resize": {"flavorRef": larger["id"]}}, "VERIFY_RESIZE")
        self.assertEqual([server["id"]], [*self.disks(node)])
        self._confirm_resize(server)
        self.assertEqual(b"stays", self.read(server)[:5])
