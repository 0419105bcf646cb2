"""A replay against a small NBD server."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import tempfile
import threading
import zlib
from pathlib import Path

from testtools import ExpectedException, TestCase

from benchmarks.errors import DiskFailed, TookTooLong
from benchmarks.nbdreplay import Disk, NbdDisk, replay
from benchmarks.trace import Read

CONTENT = os.urandom(1 << 16)


class NbdServer:
    """Serves CONTENT, read-only, to any number of clients; fails reads at ``bad``, does not answer at ``mute``."""

    def __init__(self, path: Path, *, bad: int = -1, mute: int = -1) -> None:
        self._bad, self._mute = bad, mute
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._clients: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for client in self._clients:
            client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for client in (self._listener, *self._clients):
            client.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._clients.append(client)
            self._threads.append(threading.Thread(target=self._serve, args=[client]))
            self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client.makefile("rb") as requests, contextlib.suppress(ConnectionError):  # a client that gave up
            client.sendall(b"NBDMAGICIHAVEOPT" + struct.pack(">H", 3))
            requests.read(4 + 8 + 4)
            requests.read(int.from_bytes(requests.read(4), "big"))
            client.sendall(struct.pack(">QH", len(CONTENT), 1))
            while len(request := requests.read(28)) == 28:
                _, _, _, handle, offset, length = struct.unpack(">IHHQQI", request)
                if offset == self._mute:
                    continue
                error = errno.EIO if offset == self._bad else 0
                data = b"" if error else CONTENT[offset : offset + length]
                client.sendall(struct.pack(">IIQ", 0x67446698, error, handle) + data)


class ReplayTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory(dir="/tmp")
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "nbd"
        self.reads = (Read(0.0, 0, 512), Read(0.05, 1000, 40000), Read(0.05, 0, 512))

    def serve(self, *, bad: int = -1, mute: int = -1) -> None:
        self.addCleanup(NbdServer(self.path, bad=bad, mute=mute).close)

    def disks(self) -> list[Disk]:
        return [Disk(f"{host}-{vm}", host, self.path, verify=vm == 0) for host in "abc" for vm in range(3)]

    def test_every_vm_reads_all_and_the_bytes_are_right(self) -> None:
        self.serve()
        done = replay(self.disks(), self.reads, think=0, limit=30)
        self.assertEqual({disk.vm for disk in self.disks()}, {vm.vm for vm in done.vms})
        expected = zlib.crc32(b"".join(CONTENT[read.offset : read.offset + read.length] for read in self.reads))
        self.assertEqual({expected, None}, {vm.checksum for vm in done.vms})
        self.assertEqual([9, 9, 9], [len(waits) for waits in done.waits.values()])
        self.assertEqual({"a", "b", "c"}, set(done.hosts))

    def test_the_first_of_a_host_is_timed_for_each_read(self) -> None:
        self.serve()
        done = replay(self.disks(), self.reads, think=0, limit=30)
        for times in done.hosts.values():
            self.assertEqual(sorted(times.first_asked), times.first_asked)
            self.assertGreater(min(times.first_waited), 0)

    def test_the_recorded_gaps_pass_before_the_reads(self) -> None:
        self.serve()
        done = replay(self.disks(), self.reads, think=2, limit=30)
        for vm in done.vms:
            self.assertGreaterEqual(vm.ended - vm.began, 0.1)

    def test_a_read_that_fails_is_an_error(self) -> None:
        self.serve(bad=1000)
        with ExpectedException(DiskFailed, ".*Input/output error"):
            replay(self.disks(), self.reads, think=0, limit=30)

    def test_an_answer_that_never_comes_is_an_error_when_time_is_up(self) -> None:
        self.serve(mute=1000)
        with ExpectedException(TookTooLong, ".*VMs had not read.*"):
            replay(self.disks(), self.reads, think=0, limit=0.5)

    def test_one_disk_can_be_read_by_hand(self) -> None:
        self.serve(bad=4096)
        with NbdDisk(self.path, "any") as disk:
            self.assertEqual(CONTENT[10:20], disk.read(10, 10))
            with ExpectedException(DiskFailed, ".*Input/output error"):
                disk.read(4096, 1)
