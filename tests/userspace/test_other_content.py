"""A name that is published again with other content, while VMs still run from the old one."""

from __future__ import annotations

import hashlib
from pathlib import Path

from drivers.errors import NotServing
from drivers.nbd.probe import Client
from tests.patience import PATIENCE
from tests.userspace.hosts import HostsTestCase, wait_until

MIB = 1 << 20


class OtherContentTest(HostsTestCase):
    volt_options = ("--heartbeat", "0.5", "--lease", "60")

    def test_no_host_reads_the_content_that_it_did_not_ask_for(self) -> None:
        old, new = self.image_file("old"), self.image_file("new")
        reader = self.host("reader")
        origin, first, second = self.host("origin").start(), reader.start(), self.host("second").start()
        origin.publish("img", old)
        first.create("vm", "img")
        socket, key = self.folder / "r-reader" / "serve" / "img.sock", hashlib.sha256(old.read_bytes()).hexdigest()
        with Client(socket, key, timeout=PATIENCE) as client:
            self.assertEqual(old.read_bytes()[:MIB], client.read(0, MIB))
        reader.kill()
        self.volt.client().remove_host("reader")
        self.volt.client().remove_image("img")
        wait_until(lambda: origin.gc() and not origin.status().images, "the origin has let go of the image")
        origin.publish("img", new)
        reader.start()
        self.assert_same_content(Path(second.create("vm", "img").disk.path), new)
        with Client(socket, key, timeout=PATIENCE) as client:
            self.assertEqual(old.read_bytes()[:MIB], client.read(0, MIB))
        with Client(socket, key, timeout=2) as client:
            self.assertRaises(NotServing, client.read, 4 * MIB, MIB)  # it waits for who has the old content
