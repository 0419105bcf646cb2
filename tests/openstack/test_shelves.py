"""Servers that boot from a base, and are put on the shelf and taken back."""

from __future__ import annotations

from pathlib import Path

from tests.openstack.computes import ServerCase


class ShelfTest(ServerCase):
    """One server."""

    def test_a_server_comes_back_from_the_shelf_with_what_it_wrote(self) -> None:
        self.write(self.server, b"shelved")
        self.act(self.server, {"shelve": None}, "SHELVED_OFFLOADED")
        self.assertEqual([], self.all_disks())
        self.act(self.server, {"unshelve": None}, "ACTIVE")
        self.assertEqual(b"shelved", self.read(self.server)[:7])
        self._delete_server(self.server)
        self.assertEqual([], self.all_disks())

    def test_a_server_with_a_second_private_disk_which_no_image_would_keep_is_not_shelved(self) -> None:
        file = self.folder / "data.raw"
        file.write_bytes(b"data" * (1 << 18))
        second = self.cinder.add(file)
        server = self.boot(block_device_mapping_v2=self.devices(self.volume, second))
        self.api.post_server_action(server["id"], {"shelve": None})
        self.soon(lambda: bool(self.failures(server)))
        path = self.agent(self.node_of(server)).vm(self.disk_of(server, second)).disk.path
        self.assertEqual(b"data", self.read_qcow2(Path(path))[:4])

    def test_the_image_of_a_server_that_came_back_goes_when_no_disk_is_made_of_it(self) -> None:
        for action, state in (({"shelve": None}, "SHELVED_OFFLOADED"), ({"unshelve": None}, "ACTIVE")):
            self.act(self.server, action, state)
        self.all_upkeep()
        self.assertEqual(2, len(self.images()))
        self._delete_server(self.server)
        self.all_upkeep()
        self.soon(lambda: [*self.images()] == [self.image()])
