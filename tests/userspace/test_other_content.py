"""A name that is published again with other content, while VMs still run from the old one."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drivers.digests import key_of
from drivers.errors import NotServing
from drivers.nbd.probe import Client
from tests.patience import PATIENCE, wait_until
from tests.userspace.hosts import HostsTestCase

MIB = 1 << 20
WAITS = 2.0
"""Seconds without an answer, after which a read counts as one that waits."""


class OtherContentTest(HostsTestCase):
    volt_options = ("--heartbeat", "0.5", "--lease", "60")

    def test_no_host_reads_the_content_that_it_did_not_ask_for(self) -> None:
        old, new = self.image_file("old"), self.image_file("new")
        reader = self.host("reader")
        origin, first, second = self.host("origin").start(), reader.start(), self.host("second").start()
        path, key = self.folder / "r-reader" / "serve" / "img.sock", key_of(origin.publish("img", old).digest)
        first.create("vm", "img")
        with Client(path, key, timeout=PATIENCE) as client:
            self.assertEqual(old.read_bytes()[:MIB], client.read(0, MIB))
        reader.kill()
        self.volt.client().remove_host("reader")
        origin.unpublish("img")
        wait_until(lambda: origin.gc() and not origin.status().images, "the origin has removed the image")
        origin.publish("img", new)
        reader.start()
        self.assert_same_content(Path(second.create("vm", "img").disk.path), new)
        with Client(path, key, timeout=PATIENCE) as client:
            self.assertEqual(old.read_bytes()[:MIB], client.read(0, MIB))
        with Client(path, key, timeout=PATIENCE) as client, ThreadPoolExecutor() as pool:
            reading = pool.submit(client.read, 4 * MIB, MIB)  # it waits for who has the old content
            self.assertRaises(TimeoutError, reading.result, WAITS)
            with socket.socket(fileno=os.dup(client.fileno())) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            self.assertIsInstance(reading.exception(PATIENCE), NotServing)
