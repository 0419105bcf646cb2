"""The life of servers that boot from a base, through Nova's API."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from lxml import etree
from nova import exception, objects
from nova.compute import task_states
from nova.virtman import disks

from tests.openstack.computes import GLANCE_IMAGE, ComputesTest, sha256

DISK = (
    '<disk type="file" device="disk"><driver name="qemu" type="qcow2" cache="none" error_policy="stop"'
    ' rerror_policy="stop"/><alias name="ua-{volume}"/>'
    '<source file="{path}"/><target dev="vda" bus="virtio"/><serial>{volume}</serial></disk>'
)


class LifeTest(ComputesTest):
    """One or a few servers."""

    def setUp(self) -> None:
        super().setUp()
        self.server = self.boot()
        self.node = self.node_of(self.server)
        self.other = next(name for name in self.cluster.names if name != self.node)

    def test_libvirt_gets_the_private_disk_of_the_host(self) -> None:
        (disk,) = self.xml[self.server["id"]].findall("devices/disk")
        self.assertEqual(DISK.format(path=self.disks(self.node)[self.server["id"]], volume=self.volume), plain(disk))
        self.assertEqual(sha256(self.content), sha256(self.read(self.server)))

    def test_a_server_keeps_what_it_wrote_when_it_is_stopped_started_and_rebooted(self) -> None:
        self.write(self.server, b"kept")
        for action, state in (({"os-stop": None}, "SHUTOFF"), ({"os-start": None}, "ACTIVE")):
            self.act(self.server, action, state)
        for kind in ("SOFT", "HARD"):
            self.act(self.server, {"reboot": {"type": kind}}, "ACTIVE")
        self.assertEqual(b"kept", self.read(self.server)[:4])

    def test_a_deleted_server_leaves_nothing_and_takes_no_base_with_it(self) -> None:
        request = self.request()
        request["block_device_mapping_v2"][0]["delete_on_termination"] = True
        second = self.until(self.api.post_server({"server": request}), "ACTIVE")
        for server in (second, self.server):
            self._delete_server(server)
        self.assertEqual([], self.all_disks())
        self.assertIn(self.volume, self.cinder.volumes)

    def test_a_server_that_is_rebuilt_begins_anew_also_if_its_disk_could_not_be_destroyed(self) -> None:
        self.write(self.server, b"gone")
        instance = objects.Instance.get_by_uuid(self.admin, self.server["id"])
        instance.task_state = task_states.REBUILD_SPAWNING
        disks.ready(self.node, instance, self.volume)
        self.assertEqual(sha256(self.content), sha256(self.read(self.server)))

    def test_a_server_that_is_rebuilt_begins_anew(self) -> None:
        self.write(self.server, b"gone")
        self.act(self.server, {"rebuild": {"imageRef": GLANCE_IMAGE}}, "ACTIVE")
        self.assertEqual(sha256(self.content), sha256(self.read(self.server)))
        self.assertEqual([self.server["id"]], self.all_disks())

    def test_a_server_is_not_rebuilt_from_an_image_that_is_not_its_bases(self) -> None:
        another = "76fa36fc-c930-4bf3-8c8a-ea2a2420deb6"
        said = self.refused(lambda: self.act(self.server, {"rebuild": {"imageRef": another}}, "ACTIVE"))
        self.assertIn("Unable to rebuild with a different image for a volume-backed server", said)

    def test_a_resize_to_another_host_takes_the_data_along_and_its_confirmation_frees_the_old_disk(self) -> None:
        self.write(self.server, b"moved")
        self.act(self.server, {"migrate": None}, "VERIFY_RESIZE")
        self.assertEqual(self.other, self.node_of(self.server))
        self.assertEqual(b"moved", self.read(self.server)[:5])
        self.assertEqual([self.server["id"]] * 2, self.all_disks())
        self._confirm_resize(self.server)
        self.assertEqual({}, self.disks(self.node))
        self.assertEqual(b"moved", self.read(self.server)[:5])

    def test_a_resize_replaces_what_an_earlier_try_has_left_at_the_other_host(self) -> None:
        self.write(self.server, b"moved")
        self.agent(self.other).create(self.disk_of(self.server, self.volume), f"cinder-{self.volume}")
        self.act(self.server, {"migrate": None}, "VERIFY_RESIZE")
        self.assertEqual(b"moved", self.read(self.server)[:5])

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
        self.computes[self.node].stop()
        service = self.admin_api.get_services(host=self.node, binary="nova-compute")[0]
        self.admin_api.put_service(service["id"], {"forced_down": True})
        self.api.post_server_action(self.server["id"], {"evacuate": {}})
        server = self.until(self.server, "SHUTOFF")
        self.assertEqual(self.other, self.node_of(server))
        self.assertEqual(sha256(self.content), sha256(self.read(server)))

    def test_a_snapshot_of_a_server_is_an_image_with_what_it_wrote(self) -> None:
        self.write(self.server, b"snapshot")
        self.act(self.server, {"os-stop": None}, "SHUTOFF")
        self.api.post_server_action(self.server["id"], {"createImage": {"name": "copy"}})
        self.until(self.server, "SHUTOFF")
        image = next(image for image in self.glance.detail(self.admin) if image["name"] == "copy")
        self.assertEqual("active", image["status"])
        self.assertEqual(b"snapshot", self.read_qcow2(self.image_file(image["id"]))[:8])

    def test_a_server_comes_back_from_the_shelf_with_what_it_wrote(self) -> None:
        self.write(self.server, b"shelved")
        self.act(self.server, {"shelve": None}, "SHELVED_OFFLOADED")
        self.assertEqual([], self.all_disks())
        self.act(self.server, {"unshelve": None}, "ACTIVE")
        self.assertEqual(b"shelved", self.read(self.server)[:7])
        self._delete_server(self.server)
        self.assertEqual([], self.all_disks())

    def test_a_base_that_was_attached_to_a_shelved_server_is_to_be_detached_before_it_comes_back(self) -> None:
        second = self.cinder.add(self.file)
        self.act(self.server, {"shelve": None}, "SHELVED_OFFLOADED")
        self.api.post_server_volume(self.server["id"], {"volumeAttachment": {"volumeId": second}})
        self.api.post_server_action(self.server["id"], {"unshelve": None})
        self.soon(lambda: any(f"volume {second} is a base" in why for why in self.failures(self.server)))
        self.until_shelved()
        self.api.delete_server_volume(self.server["id"], second)
        self.soon(lambda: len(self.api.get_server_volumes(self.server["id"])) == 1)
        self.act(self.server, {"unshelve": None}, "ACTIVE")

    def until_shelved(self) -> None:
        """Wait for Nova to give up on bringing the server back."""

        def is_shelved() -> bool:
            found = self.admin_api.get_server(self.server["id"])
            return found["status"] == "SHELVED_OFFLOADED" and found["OS-EXT-STS:task_state"] is None

        self.soon(is_shelved)

    def test_a_server_with_a_second_private_disk_which_no_image_would_keep_is_not_shelved(self) -> None:
        file = self.folder / "data.raw"
        file.write_bytes(b"data" * (1 << 18))
        second = self.cinder.add(file)
        request = self.request()
        request["block_device_mapping_v2"].append(
            {"boot_index": -1, "uuid": second, "source_type": "volume", "destination_type": "volume"}
        )
        server = self.until(self.api.post_server({"server": request}), "ACTIVE")
        self.api.post_server_action(server["id"], {"shelve": None})
        self.soon(lambda: bool(self.failures(server)))
        path = self.agent(self.node_of(server)).vm(self.disk_of(server, second)).disk.path
        self.assertEqual(b"data", self.read_qcow2(Path(path))[:4])

    def image_file(self, image: str) -> Path:
        """What Glance holds of an image."""
        file = self.folder / "image"
        self.glance.download(self.admin, image, dst_path=file)
        return file

    def test_the_image_of_a_server_that_came_back_goes_when_no_disk_is_made_of_it(self) -> None:
        for action, state in (({"shelve": None}, "SHELVED_OFFLOADED"), ({"unshelve": None}, "ACTIVE")):
            self.act(self.server, action, state)
        self.all_upkeep()
        self.assertEqual(2, len(self.images()))
        self._delete_server(self.server)
        self.all_upkeep()
        self.soon(lambda: [*self.images()] == [f"cinder-{self.volume}"])

    def test_a_server_stays_on_its_private_disk_when_the_mark_is_taken_from_the_volume(self) -> None:
        self.write(self.server, b"moved")
        self.cinder.volumes[self.volume]["volume_metadata"].clear()
        self.act(self.server, {"migrate": None}, "VERIFY_RESIZE")
        self._confirm_resize(self.server)
        self.assertEqual(b"moved", self.read(self.server)[:5])
        self.assertEqual(1, len(self.cinder.attachments))


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


def plain(element: Any) -> str:
    """An element of XML without the blanks between its parts."""
    text = etree.tostring(element, encoding="unicode")
    return re.sub(r">\s+<", "><", text).strip()
