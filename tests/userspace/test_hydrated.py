"""Hosts that keep all of an image, and hosts that fetch what others read first."""

from __future__ import annotations

from pathlib import Path

from tests.patience import wait_until
from tests.programs import qemu_io
from tests.userspace.test_cluster import ClusterTestCase, image_of
from virtman.client import AgentClient
from virtman.models import Hydration

MIB = 1 << 20


def is_whole(client: AgentClient) -> bool:
    hydration = image_of(client).hydration
    return hydration is not None and hydration.whole


class HydratedTest(ClusterTestCase):
    def test_a_vm_reads_all_of_it_after_the_parent_and_volt_have_died_and_all_of_the_host_too(self) -> None:
        [(host, client)] = self.hosts(1)
        client.hydrate("img")
        host.kill()
        client = host.start()
        client.repair()
        size = self.file.stat().st_size
        self.assertEqual(Hydration(done=size, total=size, whole=True), client.hydrate("img", until_ready=True))
        volt = self.volt.client()
        wait_until(lambda: volt.tree("img").root.children[0].whole, "Volt knows it")
        self.volt.stop()
        self.origin.tear_down()
        host.kill()
        host.kill_daemons()
        client = host.start()
        client.repair()
        self.assert_same_content(Path(client.create("vm", "img").disk.path), self.file)
        wait_until(lambda: is_whole(client), "it is whole again")
        self.assertEqual(size, image_of(client).fetched_bytes)

    def test_it_stays_without_a_vm_until_it_is_cancelled(self) -> None:
        [(_, client)] = self.hosts(1)
        client.hydrate("img", until_ready=True)
        self.assertEqual([], client.gc().stacks)
        client.end_hydration("img")
        self.assertEqual((None, ["img"]), (image_of(client).hydration, client.gc().stacks))


class SparseTest(ClusterTestCase):
    def test_holes_do_not_travel(self) -> None:
        file = self.folder / "sparse.raw"
        with file.open("wb") as out:
            out.truncate(15 << 30)
            for part in range(4):
                out.seek(part * 4 << 30)
                out.write(self.file.read_bytes())
        self.origin.client().publish("sparse", file)
        [(_, client)] = self.hosts(1)
        self.assertTrue(client.hydrate("sparse", until_ready=True).whole)
        self.assertEqual(self.file.stat().st_size, image_of(client, "sparse").fetched_bytes)


class BootSetTest(ClusterTestCase):
    def test_a_host_that_attaches_an_image_fetches_what_vms_read_elsewhere(self) -> None:
        self.volt.client().add_boot_set("img", [[2 * MIB, 3 * MIB], [0, MIB]])
        [(_, client)] = self.hosts(1)
        client.create("vm", "img")
        wait_until(lambda: image_of(client).fetched_bytes == 2 * MIB, "it is fetched though nobody reads")
        self.origin.tear_down()
        qemu_io(client.vm("vm").disk.path, f"read {2 * MIB} {MIB}", options=["-r", "-f", "qcow2"])
