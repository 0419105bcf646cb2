"""An image that is withdrawn goes from all hosts by itself when nobody needs it, and not before."""

from __future__ import annotations

from pathlib import Path

from tests.patience import wait_until
from tests.userspace.hosts import HostProcess
from tests.userspace.test_cluster import ClusterTestCase, image_of, wait_fetched
from virtman import errors
from virtman.client import AgentClient

MIB = 1 << 20


def left(host: HostProcess) -> set[str]:
    """What a host has of images: content, what its chunk store serves and keeps, and what stacks leave."""
    folders = (host.state / "images", host.state / "manifests")
    return (
        host.files() | host.served() | {path.name for folder in folders if folder.exists() for path in folder.iterdir()}
    )


class WithdrawnTestCase(ClusterTestCase):
    def withdraw(self) -> None:
        """Have the origin withdraw the image, which returns at once."""
        answer = self.origin.client().unpublish("img", when_unused=True)
        self.assertTrue(answer.withdrawn)

    def assert_goes(self, *hosts: HostProcess) -> None:
        """Nothing of the image stays anywhere."""
        everywhere = (*hosts, self.origin)
        wait_until(lambda: not any(map(left, everywhere)), "nothing is left of it")
        self.assertEqual([], self.volt.client().images())
        for host in everywhere:
            status = host.client().status()
            self.assertEqual(([], {}), (status.images, status.troubles))


class ChainTest(WithdrawnTestCase):
    """Each host below the one before: with wider trees the last host takes the place of one that leaves."""

    volt_options = (*WithdrawnTestCase.volt_options, "--fanout", "1")

    def test_a_vm_reads_new_ranges_through_idle_parents_until_it_is_destroyed(self) -> None:
        hosts = self.hosts(3)
        clients: dict[str, AgentClient] = {host.name: client for host, client in hosts}
        for client in clients.values():
            client.create("vm", "img")
        [first] = self.volt.client().tree("img").root.children
        [(parent, last)] = [(node.host, below.host) for node in first.children for below in node.children]
        wait_until(lambda: last in image_of(clients[parent]).children, "the parent knows of its child")
        for name, client in clients.items():
            if name != last:
                client.destroy("vm")
        self.withdraw()
        stranger = self.host("stranger").start()
        self.assertRaises(errors.ImageWithdrawn, stranger.create, "vm", "img")
        size, had = self.file.stat().st_size, [image.fetched_bytes for image in clients[parent].status().images]
        self.assert_same_content(Path(clients[last].vm("vm").disk.path), self.file)
        wait_fetched(clients[last], size)
        self.assertEqual([0], had)
        self.assertGreater(image_of(clients[parent]).fetched_bytes, 0)  # on a slow machine some come from its parent
        clients[last].destroy("vm")
        self.assert_goes(*(host for host, _ in hosts))


class LeaseTest(WithdrawnTestCase):
    volt_options = ("--heartbeat", "0.5", "--lease", "3")

    def test_a_host_whose_lease_ran_out_is_awaited_and_reads_on(self) -> None:
        [(host, client)] = self.hosts(1)
        disk = Path(client.create("vm", "img").disk.path)
        self.withdraw()
        host.kill()
        volt = self.volt.client()
        wait_until(lambda: not volt.image("img").nodes, "the lease ran out")
        self.assertEqual(["img"], [image.name for image in self.origin.client().status().images])
        client = host.start()
        wait_until(lambda: volt.image("img").nodes, "the host is in the tree again")
        self.assert_same_content(disk, self.file)
        client.destroy("vm")
        self.assert_goes(host)
