"""Many servers of one base at once, servers of a snapshot of a base, and two hosts that attach a base at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from tests.openstack.agreement import AgreeingTest
from tests.openstack.cinder import nobody_listens
from tests.openstack.computes import ComputesTest, sha256
from tests.patience import PATIENCE


class WaveTest(ComputesTest):
    """Many servers at once."""

    def test_one_request_makes_many_servers_of_one_base_that_one_host_attaches(self) -> None:
        server = self.api.post_server({"server": self.request(min_count=20, max_count=20)})
        servers = [self.until(found, "ACTIVE") for found in self.api.get_servers()]
        self.assertIn(server["id"], [found["id"] for found in servers])
        self.assertEqual(20, len(servers))
        self.assertEqual(sorted(found["id"] for found in servers), self.all_disks())
        self.assertEqual(1, len(self.images()[self.image()]))
        self.assertEqual(1, len(self.cinder.attachments))
        self.assertEqual(1, [name for name, _ in self.cinder.calls].count("attachment_complete"))
        for found in servers:
            self._delete_server(found)
        self.assertEqual([], self.all_disks())

    def test_servers_boot_from_a_snapshot_of_a_base_by_one_volume_for_all_and_have_the_size_asked_for(self) -> None:
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
        self.let_stacks_go()
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


class VoltKilledTest(AgreeingTest):
    """Many servers at once, and kill -9 of Volt."""

    def test_during_a_wave(self) -> None:
        self.boot()
        self.api.post_server({"server": self.request(min_count=8, max_count=8)})
        self.soon(lambda: sum(len(self.agent(node).vms()) for node in self.cluster.names) > 2)
        self.cluster.kill_volt()
        self.soon(lambda: {one["status"] for one in self.api.get_servers(detail=True)} <= {"ACTIVE", "ERROR"})
        self.cluster.start_volt()
        self.repair()
        active = {one["id"] for one in self.api.get_servers(detail=True) if one["status"] == "ACTIVE"}
        self.assertEqual(active, active & {*self.all_disks()})
        for server in self.api.get_servers():
            self.delete(server)
        self.assert_agreement()


class CinderTest(AgreeingTest):
    """Two hosts at once."""

    def here(self, number: int) -> dict[str, Any]:
        """Have a server made at this host."""
        return {"availability_zone": f"nova:{self.cluster.names[number]}"}

    def test_two_hosts_that_attach_a_base_at_the_same_moment(self) -> None:
        self.flags(origin=True, group="virtman")
        for several in (False, True):
            self.cinder.volumes[self.volume]["multiattach"] = several
            self.cinder.step = together("before attachment_create", 2)
            asked = [self.api.post_server({"server": self.request(**self.here(number))}) for number in range(2)]
            for server in asked:
                self.until(server, "ACTIVE")
            self.cinder.step = nobody_listens
            self.repair()
            self.assertEqual(1, len(self.images()[self.image()]))
            for server in asked:
                self.delete(server)
            self.assert_agreement()
            self.detach_base()


def together(step: str, count: int) -> Callable[[str], None]:
    """Hold those that come to a step until there are so many."""
    all_there = threading.Barrier(count)

    def wait(name: str) -> None:
        if name == step and not met:
            all_there.wait(PATIENCE)
            met.append(name)

    met: list[str] = []
    return wait
