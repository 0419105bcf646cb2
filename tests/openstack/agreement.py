"""What Nova, the hosts' agents, Cinder and Volt have to agree about, whichever process was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nova.tests.functional.api.client import OpenStackApiNotFoundException

from lab.process import attempts, processes_of
from tests.openstack.computes import ComputesTest

MARK = b"what the user wrote"
GIVEN_UP = 60.0
"""Seconds after which what hosts still have is taken for left over."""


class AgreeingTest(ComputesTest):
    """After a repair nothing is left of what is not needed, and what is needed is there."""

    def repair(self) -> None:
        """What computes do within two minutes after their start."""
        for _round in range(2):
            self.all_upkeep()

    def assert_agreement(self, said: str = "") -> None:
        """Assert it when there is no server. Hosts remove withdrawn images by themselves; the next upkeep goes on."""
        for _try in attempts(GIVEN_UP):
            self.all_upkeep()
            if not self.differences():
                return
        self.assertEqual([], self.differences(), said)

    def copies(self, server: dict[str, Any]) -> dict[str, bytes]:
        """What the disks of a server hold, by node."""
        disks = {node: self.disks(node).get(server["id"]) for node in self.cluster.names}
        return {node: self.read_qcow2(Path(path))[: len(MARK)] for node, path in disks.items() if path is not None}

    def delete(self, server: dict[str, Any]) -> None:
        """As the server's user does; returns when it is gone."""
        self.api.delete_server(server["id"])
        self.soon(lambda: not self._is_there(server))

    def _is_there(self, server: dict[str, Any]) -> bool:
        try:
            self.api.get_server(server["id"])
        except OpenStackApiNotFoundException:
            return False
        return True

    def detach_base(self) -> None:
        """An operator detaches the base in Cinder; returns when no host has anything of it."""
        self.cinder.attachments.clear()
        self.cinder.volumes[self.volume]["status"] = "available"
        self.cinder.keep()
        self.soon(self._base_is_removed)

    def _base_is_removed(self) -> bool:
        self.all_upkeep()
        return not self.stacks() and not self.images()

    def differences(self) -> list[str]:
        """Where Nova, hosts, Cinder and Volt do not agree, when there is no server."""
        images, found = self.images(), [f"image {name}" for name in self.images() if name != self.image()]
        for number, node in enumerate(self.cluster.names):
            state = self.cluster.state_folder(number)
            parts = ("snapshots", "snapshots/.layers", "records/vms")
            disks = [path for part in parts for path in sorted((state / part).glob("*")) if path.name != ".layers"]
            found += [f"{node}: {path}" for path in disks]
            stacks = [stack.name for stack in self.agent(node).status().images]
            daemons = [
                line for line in processes_of(self.cluster.run_folder(number)).values() if "storage-daemon" in line
            ]
            if len(daemons) != len(stacks):
                found.append(f"{node}: stacks {stacks}, daemons {daemons}")
            whole = (self._attachments(node), self._notes(node), [name for name in images if node in images[name]])
            if whole not in (([], [], []), ([self.volume], [self.volume], [self.image()])):
                found.append(f"{node}: attachments, notes and published images are {whole}")
        return found

    def _attachments(self, node: str) -> list[str]:
        from nova.virtman import origins

        return [one["volume_id"] for one in self.cinder.attachment_get_all(origins.holder_of(node))]

    def _notes(self, node: str) -> list[str]:
        return [path.stem for path in (self.folder / "nova/virtman" / node).rglob("*") if path.is_file()]
