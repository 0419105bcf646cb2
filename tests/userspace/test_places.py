"""Hosts with sites and racks: who reads from whom."""

from __future__ import annotations

import json
from pathlib import Path

from tests.patience import wait_until
from tests.userspace.hosts import HostProcess
from tests.userspace.test_cluster import ClusterTestCase, wait_fetched
from virtman.client import AgentClient
from volt.client import TreeNode


class PlacesTest(ClusterTestCase):
    def start(self, name: str, place: str) -> tuple[HostProcess, AgentClient]:
        host = self.host(name)
        host.settings["VIRTMAN_PLACE"] = place
        return host, host.start()

    def readers(self) -> dict[str, tuple[str | None, str]]:
        """By host, from which one it reads, and where it is."""
        volt = self.volt.client()
        waiting: list[TreeNode] = list(volt.tree("img").root.children)
        for node in waiting:
            waiting.extend(node.children)
        return {node.host: (node.parent, node.place) for node in waiting}

    def test_an_image_comes_to_each_rack_once_and_a_host_that_moves_reads_there(self) -> None:
        hosts = [self.start(name, f"site/{name[0]}") for name in ("a1", "b1", "b2", "a2")]
        for _, client in hosts:
            self.assert_same_content(Path(client.create("vm", "img").disk.path), self.file)
        expected = {"a1": ("origin", "site/a"), "a2": ("a1", "site/a"), "b1": ("a1", "site/b"), "b2": ("b1", "site/b")}
        wait_until(lambda: self.readers() == expected, "each host reads from its rack or the rack before")
        kept = json.loads((hosts[-1][0].state / "records/images/img.json").read_text())
        self.assertEqual([("a1", False), ("origin", True)], [(each["host"], each["far"]) for each in kept["parents"]])
        for _, client in hosts:
            wait_fetched(client, self.file.stat().st_size)
        host, _ = hosts[-1]
        host.stop()
        host.settings["VIRTMAN_PLACE"] = "site/b"
        client = host.start()
        wait_until(lambda: self.readers().get("a2") == ("b1", "site/b"), "it reads from its new rack")
        self.assert_same_content(Path(client.vm("vm").disk.path), self.file)
