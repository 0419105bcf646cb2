"""Many servers of one base at once, and servers of a snapshot of a base."""

from __future__ import annotations

import os

from nova import exception

from tests.openstack.computes import ComputesTest, sha256


class WaveTest(ComputesTest):
    """Many servers at once."""

    def test_one_request_makes_many_servers_of_one_base_that_one_host_attaches(self) -> None:
        server = self.api.post_server({"server": self.request(min_count=20, max_count=20)})
        servers = [self.until(found, "ACTIVE") for found in self.api.get_servers()]
        self.assertIn(server["id"], [found["id"] for found in servers])
        self.assertEqual(20, len(servers))
        self.assertEqual(sorted(found["id"] for found in servers), self.all_disks())
        self.assertEqual(1, len(self.images()[f"cinder-{self.volume}"]))
        self.assertEqual(1, len(self.cinder.attachments))
        self.assertEqual(1, [name for name, _ in self.cinder.calls].count("attachment_complete"))
        for found in servers:
            self._delete_server(found)
        self.assertEqual([], self.all_disks())

    def test_servers_boot_from_a_snapshot_of_a_base_by_one_volume_for_all_and_have_the_size_asked_for(
        self,
    ) -> None:
        snapshot = self.cinder.add_snapshot(self.volume)
        request = self.request(min_count=3, max_count=3)
        (device,) = request["block_device_mapping_v2"]
        device.update(uuid=snapshot, source_type="snapshot", volume_size=2, delete_on_termination=True)
        self.api.post_server({"server": request})
        servers = [self.until(found, "ACTIVE") for found in self.api.get_servers()]
        self.assertEqual(3, len(servers))
        (standin,) = set(self.cinder.volumes) - {self.volume}
        self.assertEqual([f"cinder-{standin}"], [*self.images()])
        for server in servers:
            self.assertEqual(2 << 30, self.agent(self.node_of(server)).vm(self.disk_of(server, standin)).disk.size)
            self.assertEqual(sha256(self.content), sha256(self.read(server)))
            self._delete_server(server)
        self.assertEqual([], self.all_disks())
        self.assertIn(standin, self.cinder.volumes)
        del self.cinder.snapshots[snapshot]
        self.all_upkeep()
        self.soon(lambda: not self.stacks())
        self.all_upkeep()
        self.assertEqual([self.volume], [*self.cinder.volumes])
        self.assertEqual({}, self.cinder.attachments)

    def test_no_volume_of_somebody_else_stands_for_a_snapshot_whatever_its_metadata_say(self) -> None:
        snapshot = self.cinder.add_snapshot(self.volume)
        file = self.folder / "foreign.raw"
        file.write_bytes(b"foreign!" * (1 << 17))
        foreign = self.cinder.add(file)
        self.cinder.volumes[foreign]["volume_metadata"]["virtman_snapshot"] = snapshot
        request = self.request()
        request["block_device_mapping_v2"][0].update(uuid=snapshot, source_type="snapshot", volume_size=1)
        server = self.until(self.api.post_server({"server": request}), "ACTIVE")
        self.assertEqual(sha256(self.content), sha256(self.read(server)))

    def test_a_volume_that_is_no_base_is_still_for_one_server(self) -> None:
        file = self.folder / "other.raw"
        file.write_bytes(os.urandom(1 << 20))
        volume = self.cinder.add(file, base=False)
        said = self.refused(lambda: self.api.post_server({"server": self.request(volume, min_count=2)}))
        self.assertIn("Cannot attach one or more volumes to multiple instances", said)

    def test_a_volume_that_another_host_has_made_of_the_snapshot_meanwhile_is_used(self) -> None:
        snapshot = self.cinder.add_snapshot(self.volume)
        first: list[str] = []

        def another_host_is_first(step: str) -> None:
            if step == "before create" and not first:
                metadata = {"virtman_base": "true", "virtman_snapshot": snapshot}
                made = self.cinder.create(1, "", "", snapshot=self.cinder.snapshots[snapshot], metadata=metadata)
                first.append(made["id"])

        self.cinder.step = another_host_is_first
        request = self.request()
        request["block_device_mapping_v2"][0].update(uuid=snapshot, source_type="snapshot", volume_size=1)
        self.until(self.api.post_server({"server": request}), "ACTIVE")
        self.assertEqual({self.volume, *first}, {*self.cinder.volumes})
        self.assertEqual([f"cinder-{one}" for one in first], [*self.images()])

    def test_a_volume_too_many_that_cinder_does_not_delete_yet_fails_no_server_and_goes_later(self) -> None:
        snapshot = self.cinder.add_snapshot(self.volume)
        metadata = {"virtman_base": "true", "virtman_snapshot": snapshot}

        def others_are_first(step: str) -> None:
            if step == "before create" and len(self.cinder.volumes) == 1:
                self.cinder.create(1, "", "", snapshot=self.cinder.snapshots[snapshot], metadata=metadata)
                self.cinder.refuse["delete"] = exception.InvalidInput(reason="Volume status must be available")

        self.cinder.step = others_are_first
        request = self.request()
        request["block_device_mapping_v2"][0].update(uuid=snapshot, source_type="snapshot", volume_size=1)
        self.until(self.api.post_server({"server": request}), "ACTIVE")
        self.assertEqual(3, len(self.cinder.volumes))
        del self.cinder.refuse["delete"]
        self.all_upkeep()
        (left,) = set(self.cinder.volumes) - {self.volume}
        self.assertEqual([f"cinder-{left}"], [*self.images()])
