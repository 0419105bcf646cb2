"""What a compute host looks after now and then, whatever of it cannot be done."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import nova.conf
from nova import objects
from nova.compute import task_states, vm_states

from tests.openstack.agreement import MARK, AgreeingTest

FIRST, LAST = (f"nova-{digit * 8}-0000-0000-0000-{'0' * 12}-{'0' * 18}" for digit in "0f")
"""Disks of servers that are nowhere, in the order in which the agent lists them."""
LONG_AGO = 3600.0


class UpkeepTest(AgreeingTest):
    """One server, of one host."""

    COMPUTES = 1

    def setUp(self) -> None:
        super().setUp()
        self.server = self.boot()
        (self.node,) = self.cluster.names

    def instance(self) -> Any:
        """The server as Nova's services have it."""
        return objects.Instance.get_by_uuid(self.admin, self.server["id"])

    def change(self, **fields: Any) -> None:
        """Let Nova's database say this of the server."""
        instance = self.instance()
        for name, value in fields.items():
            setattr(instance, name, value)
        instance.save()

    def names(self) -> list[str]:
        """Of all disks of the host."""
        return [vm.name for vm in self.agent(self.node).vms()]

    def test_a_disk_that_cannot_be_destroyed_keeps_nothing_else_from_being_looked_after(self) -> None:
        agent = self.agent(self.node)
        for name in (FIRST, LAST):
            agent.create(name, self.image())
        self.refuse_to_destroy(FIRST)
        self.cinder.attachment_create(self.cinder.add(self.file), self.holder(), {"host": self.node})
        self.upkeep(self.node)
        self.assertEqual([FIRST, self.disk_of(self.server, self.volume)], self.names())
        self.assertEqual(1, len(self.cinder.attachments))

    def refuse_to_destroy(self, disk: str) -> None:
        """As the agent does while a VM has the disk."""
        from virtman.client import AgentClient
        from virtman.errors import Conflict

        destroy = AgentClient.destroy

        def refusing(client: AgentClient, name: str) -> Any:
            if name == disk:
                raise Conflict(f"disk {name!r} is attached to a vm")
            return destroy(client, name)

        self.enterContext(mock.patch.object(AgentClient, "destroy", refusing))

    def holder(self) -> str:
        """In whose name the host is attached to bases."""
        from nova.virtman import origins

        return origins.holder_of(self.node)

    def test_without_cinder_disks_are_looked_after(self) -> None:
        self.agent(self.node).create(LAST, self.image())
        for call in ("attachment_get", "attachment_get_all"):
            self.cinder.refuse[call] = self.unreachable()
        self.upkeep(self.node)
        self.assertEqual([self.disk_of(self.server, self.volume)], self.names())
        self.assertEqual({self.image(): [self.node]}, self.images())

    def test_a_disk_stays_on_a_host_that_the_server_has_left_until_it_is_settled_where_it_goes_on(self) -> None:
        self._stop()
        unsettled: list[dict[str, Any]] = [
            {"vm_state": vm_states.RESIZED}, {"vm_state": vm_states.ERROR}, {"vm_state": vm_states.BUILDING},
            {"vm_state": vm_states.ACTIVE, "task_state": task_states.RESIZE_MIGRATED},
        ]  # fmt: skip
        for fields in unsettled:
            self.change(host="another", **{"task_state": None, **fields})
            self.upkeep(self.node)
            self.assertEqual([self.server["id"]], self.all_disks(), fields)
        self.change(vm_state=vm_states.ACTIVE, task_state=None)
        self.upkeep(self.node)
        self.assertEqual([], self.all_disks())

    def _stop(self) -> None:
        """Have libvirt forget the server: what it runs is Nova's to destroy."""
        self.computes[self.node].driver.destroy(self.admin, self.instance(), [], {}, destroy_disks=False)

    def test_a_server_that_is_shelved_without_an_image_keeps_its_disk_and_comes_back_with_it(self) -> None:
        self.write(self.server, MARK)
        self.change(task_state=task_states.SHELVING)  # as an API without the patch does: it takes the disk for a volume
        self.computes[self.node].manager.shelve_offload_instance(self.admin, self.instance(), False, [])
        self.until(self.server, "SHELVED_OFFLOADED")
        self.upkeep(self.node)
        self.assertEqual({self.node: MARK}, self.copies(self.server))
        self.act(self.server, {"unshelve": None}, "ACTIVE")
        self.assertEqual({self.node: MARK}, self.copies(self.server))

    def test_files_of_a_snapshot_that_was_killed_are_removed_and_no_others(self) -> None:
        from nova.virtman import scratch

        parent = Path(nova.conf.CONF.instances_path)
        host = nova.conf.CONF.host
        left, new, others = (parent / f"virtman-{name}" for name in (f"{host}-left", f"{host}-new", "another-left"))
        with scratch.folder(str(parent)) as held:
            for folder in (left, new, others):
                folder.mkdir()
                (folder / "image").write_bytes(b"large")
            for folder in (left, held, others):
                os.utime(folder, (time.time() - LONG_AGO,) * 2)
            self.upkeep(self.node)
            self.assertEqual([False, True, True, True], [folder.exists() for folder in (left, new, held, others)])

    def test_cinder_does_not_hear_that_a_disk_is_detached_which_goes_with_its_server(self) -> None:
        file = self.folder / "second.raw"
        file.write_bytes(os.urandom(1 << 20))
        other = self.cinder.add(file)
        server = self.boot(block_device_mapping_v2=self.devices(self.volume, other))
        self.api.delete_server_volume(server["id"], other)
        self.soon(lambda: len(self.api.get_server_volumes(server["id"])) == 1)
        self.assertEqual("in-use", self.cinder.volumes[other]["status"])
        self.delete(server)
        self.assertEqual([self.disk_of(self.server, self.volume)], self.names())
