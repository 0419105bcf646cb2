"""Bases: who attaches them in Cinder, what happens when that fails, and when they go."""

from __future__ import annotations

import stat
import uuid
from pathlib import Path
from typing import Any

from oslo_concurrency.processutils import ProcessExecutionError

from tests.openstack.computes import CONNECT, ComputesTest, sha256


class BaseTest(ComputesTest):
    """What compute hosts do with Cinder."""

    def fault(self, **more: Any) -> str:
        """Boot a server, which fails. Returns the message that its user reads."""
        server = self.boot(state="ERROR", **more)
        message: str = server["fault"]["message"]
        self._delete_server(server)
        return message

    def nothing_is_left(self) -> None:
        self.assertEqual([], self.all_disks())
        self.assertEqual({}, self.cinder.attachments)
        self.assertEqual({}, self.images())
        self.assertEqual([], self.notes())

    def notes(self) -> list[Path]:
        """What hosts remember of bases that they are attached to."""
        return [*(self.folder / "nova/virtman").rglob("*.json")]

    def test_a_base_that_cannot_be_attached_fails_the_boot_with_a_reason_and_leaves_nothing(self) -> None:
        self.cinder.refuse["attachment_complete"] = self.unreachable()
        self.assertIn("Connection to cinder host failed: storage is away", self.fault())
        self.nothing_is_left()
        del self.cinder.refuse["attachment_complete"]
        self.boot()

    def test_a_base_is_attached_to_be_read_and_only_novas_user_reads_how(self) -> None:
        self.boot()
        self.assertEqual(["ro"], [found["mode"] for found in self.cinder.attachments.values()])
        (note,) = self.notes()
        self.assertEqual([0o600, 0o700], [stat.S_IMODE(path.stat().st_mode) for path in (note, note.parent)])

    def test_a_host_that_cannot_reach_the_storage_leaves_the_server_to_another_one(self) -> None:
        connector = "os_brick.initiator.connectors.local.LocalConnector.connect_volume"
        tried: list[Any] = []

        def connect(found: Any, properties: Any) -> Any:
            tried.append(properties)
            if len(tried) == 1:
                raise ProcessExecutionError(cmd="iscsiadm", exit_code=20)
            return CONNECT(found, properties)

        self.stub_out(connector, connect)
        self.boot()
        self.assertEqual(2, len(tried))
        self.assertEqual(1, len(self.cinder.attachments))

    def test_a_base_that_the_agent_refuses_fails_the_boot_with_its_words(self) -> None:
        self.file.write_bytes(b"odd")
        self.assertIn("in place only whole sectors of 512 bytes are served", self.fault())
        self.nothing_is_left()

    def test_a_base_that_is_not_usable_is_refused_by_the_api(self) -> None:
        for change, why in (({"status": "error"}, "is error"), ({"encrypted": True}, "is encrypted")):
            before = dict(self.cinder.volumes[self.volume])
            self.cinder.volumes[self.volume].update(change)
            self.assertIn(why, self.refused(lambda: self.api.post_server({"server": self.request()})))
            self.cinder.volumes[self.volume] = before

    def test_hosts_that_are_to_be_origins_attach_a_base_that_several_may(self) -> None:
        self.flags(origin=True, group="virtman")
        self.cinder.volumes[self.volume]["multiattach"] = True
        for node in self.cluster.names:
            self.boot(availability_zone=f"nova:{node}")
        self.assertEqual(self.cluster.names, sorted(self.images()[self.image()], reverse=True))
        self.assertEqual(2, len(self.cinder.attachments))

    def test_another_host_becomes_the_origin_of_a_base_whose_first_one_does_not_come_back(self) -> None:
        gone, other = self.cluster.names
        self.boot(availability_zone=f"nova:{gone}")
        self.cluster.kill_agent(self.cluster.names.index(gone))
        (attachment,) = self.cinder.attachments
        self.cinder.attachment_delete(attachment)
        self.flags(origin=True, group="virtman")
        server = self.boot(availability_zone=f"nova:{other}")
        self.assertIn(other, self.images()[self.image()])
        self.assertEqual(sha256(self.content), sha256(self.read(server)))

    def goes_with(self, server: dict[str, Any]) -> None:
        """The base goes when the last server that needs it does."""
        self._delete_server(server)
        self.let_stacks_go()
        self.nothing_is_left()
        self.assertEqual(self.content, self.file.read_bytes())

    def test_a_base_that_is_detached_in_cinder_goes_when_no_server_needs_it(self) -> None:
        server = self.boot()
        self.cinder.attachments.clear()
        self.all_upkeep()
        self.assertIn("withdrawn", self.fault())
        self.assertEqual([server["id"]], self.all_disks())
        self.assertEqual(1, len(self.notes()), "the device is connected as long as it is read")
        self.goes_with(server)

    def test_a_base_that_loses_its_mark_stays_attached_until_no_server_needs_it(self) -> None:
        server = self.boot()
        del self.cinder.volumes[self.volume]["volume_metadata"]["virtman_base"]
        for _round in range(2):
            self.all_upkeep()
        self.assertEqual(1, len(self.cinder.attachments), "its storage would be taken from under the server")
        self.assertEqual(sha256(self.content), sha256(self.read(server)))
        self.goes_with(server)

    def test_an_origin_serves_its_base_again_when_its_agent_has_lost_it(self) -> None:
        server = self.boot()
        node = self.node_of(server)
        self._delete_server(server)
        self.agent(node).unpublish(self.image())
        self.upkeep(node)
        self.assertEqual({self.image(): [node]}, self.images())
        self.boot()

    def test_a_disk_whose_server_is_nowhere_is_destroyed_and_no_other(self) -> None:
        server = self.boot()
        node = self.node_of(server)
        self.agent(node).create(f"nova-{uuid.uuid4()}-{'0' * 18}", self.image())
        self.agent(node).create("somebody-elses", self.image())
        self.upkeep(node)
        self.assertEqual({f"nova-{server['id']}", "somebody-elses"}, {vm.name[:41] for vm in self.agent(node).vms()})

    def test_a_server_that_was_deleted_while_its_compute_was_down_leaves_nothing(self) -> None:
        server = self.boot()
        node = self.node_of(server)
        self.lose(node)
        self._delete_server(server)
        self.upkeep(node)
        self.assertEqual([server["id"]], self.all_disks(), "libvirt has the server: Nova is to destroy it first")
        self.computes[node].driver.destroy(self.admin, self.instance(server), [], {}, destroy_disks=False)
        self.upkeep(node)
        self.assertEqual([], self.all_disks())

    def instance(self, server: dict[str, Any]) -> Any:
        from nova import context, objects

        return objects.Instance.get_by_uuid(context.get_admin_context(read_deleted="yes"), server["id"])

    def test_a_base_is_not_attached_to_a_server_that_is_there(self) -> None:
        server = self.boot()
        second = self.cinder.add(self.file)
        self.api.post_server_volume(server["id"], {"volumeAttachment": {"volumeId": second}})
        self.soon(lambda: any("not attached to one that is there" in why for why in self.failures(server)))
        self.soon(lambda: self.cinder.volumes[second]["status"] == "available")
        self.assertEqual(1, len(self.api.get_server_volumes(server["id"])))
        self.assertEqual([server["id"]], self.all_disks())

    def test_a_lost_disk_is_not_made_anew(self) -> None:
        server = self.boot()
        node = self.node_of(server)
        self.agent(node).destroy(self.agent(node).vms()[0].name)
        self.api.post_server_action(server["id"], {"reboot": {"type": "HARD"}})
        failed = self.until(server, "ERROR")
        self.assertIn("the server's data are not there", failed["fault"]["message"])
        self.assertEqual([], self.all_disks())
