"""A name that is published again with other content, while VMs still run from the old one."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drivers.digests import key_of
from drivers.errors import NbdFailed
from drivers.qemu.nbdclient import Client
from tests.patience import PATIENCE, wait_until
from tests.sockets import connected
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
        origin.publish("img", old)
        first.create("vm", "img")
        self.key = key_of(self.volt.client().image("img").digest)
        with self.read() as (client, _):
            self.assertEqual(old.read_bytes()[:MIB], client.read(0, MIB))
        reader.kill()
        self.volt.client().remove_host("reader")
        origin.unpublish("img")
        wait_until(lambda: origin.gc() and not origin.status().images, "the origin has removed the image")
        origin.publish("img", new)
        reader.start()
        self.assert_same_content(Path(second.create("vm", "img").disk.path), new)
        with self.read() as (client, _):
            self.assertEqual(old.read_bytes()[:MIB], client.read(0, MIB))
        with self.read() as (client, connection), ThreadPoolExecutor() as pool:
            reading = pool.submit(client.read, 4 * MIB, MIB)  # it waits for who has the old content
            self.assertRaises(TimeoutError, reading.result, WAITS)
            connection.shutdown(socket.SHUT_RDWR)
            self.assertIsInstance(reading.exception(PATIENCE), NbdFailed)

    @contextlib.contextmanager
    def read(self) -> Iterator[tuple[Client, socket.socket]]:
        """A client of the reader for the old content, and its connection."""
        connection = connected(self.folder / "r-reader" / "serve" / "img.sock")
        with Client(connection, self.key, timeout=PATIENCE) as client:
            yield client, connection
