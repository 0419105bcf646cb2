"""The life of an image and its VMs on whole hosts of the kernel stack; ``make test-whole`` tells more of each part."""

from __future__ import annotations

from tests.kernel.stacks import CHECK, WRITE, StackCase, fio, services

SIZE = 8 << 20


class StoryTest(StackCase):
    def test_vms_read_an_image_once_and_outlive_a_parent_that_dies_and_their_host_that_reboots(self) -> None:
        self.publish("image", SIZE)
        host, child = self.hosts[:2]
        path, other = self.create(host, "vm", "image"), self.create(host, "other", "image")
        for disk in (path, other):
            self.read(host, disk, "image", SIZE)
        self.assertLess(self.fetched(host), 1.05 * SIZE)

        host.run(fio(path, WRITE))
        kept = host.run(["sha256sum", path])
        self.agent(host).take_snapshot("vm", "kept")
        host.run(["dd", "if=/dev/urandom", f"of={path}", "bs=64K", "count=2", "conv=fsync"])
        self.agent(host).revert("vm", "kept")
        self.assertEqual(kept, host.run(["sha256sum", path]))
        self.read(host, other, "image", SIZE)

        reading = self.begin_reading(child, self.create(child, "reader", "image"), "image", SIZE, seconds=15.0)
        self.wait_until(child, "test -e /run/reader-reads")
        [image] = self.agent(child).status().images
        self.assertEqual(["host-1"], [parent.host for parent in image.paths if parent.state == "active"])
        host.cut_power()
        self.done_reading(reading)

        host.start()
        host.wait_up()
        services().start_agent(host)
        self.wait_until(host, f"test -e {path}")
        host.run(fio(path, CHECK))
        self.assertEqual(kept, host.run(["sha256sum", path]))
        self.assertEqual(["kept"], [snapshot.name for snapshot in self.agent(host).snapshots("vm")])
        self.agent(host).destroy("vm")
        self.assertEqual(["other"], [vm.name for vm in self.agent(host).vms()])
