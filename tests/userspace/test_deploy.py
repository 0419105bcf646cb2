"""Whole images to many hosts: real agents, chunk stores and Volt."""

from __future__ import annotations

from pathlib import Path

from tests.patience import wait_until
from tests.userspace.hosts import HostProcess
from tests.userspace.test_cluster import ClusterTestCase, image_of
from virtman.client import AgentClient
from virtman.errors import VoltRefused
from volt.client import Deployment

MIB = 1 << 20


class DeployTest(ClusterTestCase):
    def hosts(self, count: int) -> list[tuple[HostProcess, AgentClient]]:
        hosts = super().hosts(count)
        self.wait_known(*(host.name for host, _ in hosts))
        return hosts

    def wait_known(self, *names: str) -> None:
        """Wait until Volt knows these hosts: an agent that answers may not have told Volt of itself yet."""
        wait_until(lambda: {host.name for host in self.volt.client().hosts()}.issuperset(names), f"Volt knows {names}")

    def assert_whole(self, deployment: Deployment, hosts: list[AgentClient]) -> None:
        """The deployment has ended well, and each host has all of the image."""
        self.assertEqual({"whole"}, {host.state for host in deployment.hosts}, str(deployment.hosts))
        hydrations = [image_of(client).hydration for client in hosts]
        self.assertTrue(all(hydration is not None and hydration.whole for hydration in hydrations), str(hydrations))

    def test_every_method_brings_all_of_it_to_all_hosts(self) -> None:
        hosts = [client for _, client in self.hosts(3)]
        for number, method in enumerate(("tree", "lazy", "unicast"), start=1):
            made = hosts[0].deploy({"image": "img", "everywhere": True, "method": method})
            self.assertEqual((number, method), (made.id, made.method))
            self.assert_whole(hosts[0].follow_deployment(made.id), hosts)
            self.assertEqual([self.file.stat().st_size] * 3, [image_of(client).fetched_bytes for client in hosts])
            for client in hosts:
                client.end_hydration("img")
                client.gc()

    def test_it_is_told_what_each_host_has_sent(self) -> None:
        client = self.hosts(3)[0][1]
        made = client.deploy({"image": "img", "everywhere": True, "method": "tree"})
        client.follow_deployment(made.id)

        def sent() -> list[int]:
            return [host.sent for host in client.deployment(made.id).hosts]

        wait_until(lambda: sum(sent()) == 3 * self.file.stat().st_size, "each host has got it once")

    def test_a_vm_needs_no_other_host_afterwards(self) -> None:
        [(_, client)] = self.hosts(1)
        made = client.deploy({"image": "img", "hosts": ["h1"], "method": "tree"})
        client.follow_deployment(made.id)
        self.volt.stop()
        self.origin.tear_down()
        self.assert_same_content(Path(client.create("vm", "img").disk.path), self.file)

    def test_kill_9_of_volt_of_an_agent_and_of_a_chunk_store_ends_nothing(self) -> None:
        hosts = self.hosts(3)
        [(first, _), (_, client), (third, _)] = hosts
        made = client.deploy({"image": "img", "everywhere": True, "method": "tree"})
        self.volt.process.kill()
        self.volt.stop()
        first.kill()
        third.kill_daemons()
        self.volt.start()
        first.start()
        ended = client.follow_deployment(made.id)
        self.assert_whole(ended, [host.client() for host, _ in hosts])

    def test_what_was_cancelled_goes_on_nowhere_and_the_same_again_does_no_harm(self) -> None:
        self.origin.stop()  # nothing can be read
        [(_, client)] = self.hosts(1)
        made = client.deploy({"image": "img", "hosts": ["h1"], "method": "tree"})
        client.cancel_deployment(made.id)
        wait_until(lambda: client.deployment(made.id).hosts[0].state == "cancelled")
        self.assertTrue(client.deployment(made.id).ended)
        self.origin.start()
        for _ in range(2):
            again = client.deploy({"image": "img", "hosts": ["h1"]})
            self.assert_whole(client.follow_deployment(again.id), [client])

    def test_a_host_without_room_fails_with_one_sentence_and_the_others_go_on(self) -> None:
        small = self.host("small")
        small.settings["VIRTMAN_CACHE_LIMIT"] = str(MIB)
        full = small.start()
        self.wait_known("small")
        [(_, client)] = self.hosts(1)
        made = client.deploy({"image": "img", "hosts": ["h1", "small"], "method": "tree"})
        ended = client.follow_deployment(made.id)
        self.assertEqual({"h1": "whole", "small": "failed"}, {host.host: host.state for host in ended.hosts})
        self.assertIn("no room", ended.hosts[1].error)
        wait_until(lambda: image_of(full).hydration is None, "nothing is kept for it")

    def test_bad_input_is_refused_in_one_line(self) -> None:
        [(_, client)] = self.hosts(1)
        for wanted, said in (
            ({"image": "img", "hosts": ["nobody"]}, "nobody"),
            ({"image": "img", "place": "rome"}, "rome"),
            ({"image": "img", "everywhere": True, "method": "pigeon"}, "unicast"),
        ):
            self.assertIn(said, str(self.assertRaises(VoltRefused, client.deploy, wanted)))
        self.assertEqual([], client.deployments())
