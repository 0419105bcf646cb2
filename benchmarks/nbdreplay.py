"""Play the reads of a boot on many NBD disks at once, each disk's reads one after another.

A small NBD client with simple replies: https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md. One process
per CPU plays the disks of its hosts with epoll; a thread or process per disk would cost more than the disks themselves.
"""

from __future__ import annotations

import array
import heapq
import multiprocessing
import os
import select
import socket
import struct
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.errors import BenchmarkError, DiskFailed, TookTooLong
from benchmarks.trace import Read

CONNECT_LIMIT = 60.0
"""Seconds for a server to greet and to have the export."""

_GREETING = b"NBDMAGICIHAVEOPT"
_FIXED_NEWSTYLE_NO_ZEROES = struct.pack(">I", 3)
_OPT_EXPORT_NAME = 1
_REQUEST = struct.Struct(">IHHQQI")
_REQUEST_MAGIC = 0x25609513
_READ, _WRITE, _DISCONNECT = 0, 1, 2
_REPLY = struct.Struct(">IIQ")
_REPLY_MAGIC = 0x67446698


class NbdDisk:
    """A connection to one export of a server on a unix socket; its requests are answered one at a time.

    Raises DiskFailed, as all its calls do.
    """

    def __init__(self, server: Path, export: str) -> None:
        self.where = f"{export} at {server}"
        self.sock = _negotiated(server, export, time.monotonic() + CONNECT_LIMIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.sock.close()

    def set_timeout(self, seconds: float) -> None:
        """How long one request may take."""
        self.sock.settimeout(seconds)

    def read(self, offset: int, length: int) -> bytes:
        """The bytes of a range."""
        self._send(_REQUEST.pack(_REQUEST_MAGIC, 0, _READ, offset, offset, length))
        self._check(offset)
        return _receive(self.sock, length, self.where)

    def write(self, offset: int, data: bytes) -> None:
        """Write a range."""
        self._send(_REQUEST.pack(_REQUEST_MAGIC, 0, _WRITE, offset, offset, len(data)) + data)
        self._check(offset)

    def _send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise DiskFailed(f"{self.where}: {error}") from error

    def _check(self, handle: int) -> None:
        check_reply(_receive(self.sock, _REPLY.size, self.where), handle, self.where)


def check_reply(header: bytes, handle: int, where: str) -> None:
    """Raise DiskFailed unless a reply's header says that the request with this handle succeeded."""
    magic, error, answered = _REPLY.unpack(header)
    if magic != _REPLY_MAGIC or answered != handle:
        raise DiskFailed(f"{where}: not a reply to the request: {header.hex()}")
    if error:
        raise DiskFailed(f"{where}: {os.strerror(error)}")


def _negotiated(server: Path, export: str, deadline: float) -> socket.socket:
    """A server that is starting may greet before it has the export: asked again, with a short back-off."""
    pause = 0.005
    while True:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            _negotiate(sock, server, export)
        except BaseException as error:
            sock.close()
            if not isinstance(error, DiskFailed) or time.monotonic() + pause > deadline:
                raise
            time.sleep(pause)
            pause = min(pause * 2, 0.2)
        else:
            sock.settimeout(None)
            return sock


def _negotiate(sock: socket.socket, server: Path, export: str) -> None:
    where, name = f"{export} at {server}", export.encode()
    try:
        sock.connect(str(server))
        if not _receive(sock, 18, where).startswith(_GREETING):
            raise DiskFailed(f"{where}: not an NBD server")
        sock.sendall(_FIXED_NEWSTYLE_NO_ZEROES + b"IHAVEOPT" + struct.pack(">II", _OPT_EXPORT_NAME, len(name)) + name)
        _receive(sock, 10, where)  # size and flags; a server without this export hangs up
    except OSError as error:
        raise DiskFailed(f"{where}: {error}") from error


def _receive(sock: socket.socket, length: int, where: str) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        try:
            got = sock.recv_into(view)
        except OSError as error:
            raise DiskFailed(f"{where}: {error}") from error
        if not got:
            raise DiskFailed(f"{where}: the server hung up")
        view = view[got:]
    return bytes(data)


@dataclass(frozen=True)
class Disk:
    """A VM's disk: export ``vm`` of the server on ``socket``. ``verify``: compute the checksum of all that is read."""

    vm: str
    host: str
    socket: Path
    verify: bool = False


@dataclass(frozen=True)
class Played:
    """One VM's replay: when it began and ended (monotonic), and the CRC-32 of what it read, if asked for."""

    vm: str
    host: str
    began: float
    ended: float
    checksum: int | None


@dataclass
class HostTimes:
    """Per read of the trace: when the first VM of the host asked for it, and how long that VM waited, in seconds."""

    first_asked: list[float]
    first_waited: list[float]


@dataclass
class Replay:
    """``waits``: seconds of every read of every VM, per host. ``cpu_s``: of the replaying processes."""

    vms: list[Played] = field(default_factory=list)
    hosts: dict[str, HostTimes] = field(default_factory=dict)
    waits: dict[str, array.array[float]] = field(default_factory=dict)
    cpu_s: float = 0.0


def replay(disks: Sequence[Disk], reads: Sequence[Read], *, think: float, limit: float) -> Replay:
    """Play ``reads`` on all disks at once. ``think`` times the recorded gap passes before each read.

    Disks of one host are played by one process. Raises DiskFailed, TookTooLong after ``limit`` seconds.
    """
    context = multiprocessing.get_context("spawn")
    shares = shared_out(disks, os.cpu_count() or 1)
    barrier = context.Barrier(len(shares))
    results: list[Connection] = []
    workers = []
    for share in shares:
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(theirs, barrier, share, reads, think, limit), daemon=True)
        worker.start()
        theirs.close()
        results.append(ours)
        workers.append(worker)
    try:
        return _collected(results)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def shared_out(disks: Sequence[Disk], workers: int) -> list[list[Disk]]:
    """The disks in at most ``workers`` shares, the disks of a host together."""
    hosts: dict[str, list[Disk]] = defaultdict(list)
    for disk in disks:
        hosts[disk.host].append(disk)
    of_hosts = list(hosts.values())
    shares = [[disk for host in of_hosts[number::workers] for disk in host] for number in range(workers)]
    return [share for share in shares if share]


def _collected(results: list[Connection]) -> Replay:
    whole, silent = Replay(), False
    while results:
        for ready in wait(results):
            assert isinstance(ready, Connection)
            results.remove(ready)
            try:
                part = ready.recv()
            except EOFError:
                silent = True  # the one whose failure made it end says why
                continue
            if isinstance(part, BenchmarkError):
                raise part
            whole.vms += part.vms
            whole.hosts |= part.hosts
            whole.waits |= part.waits
            whole.cpu_s += part.cpu_s
    if silent:
        raise DiskFailed("a replaying process ended without a result")
    return whole


def _work(
    result: Connection, barrier: Barrier, disks: list[Disk], reads: Sequence[Read], think: float, limit: float
) -> None:
    try:
        player = _Player(disks, reads, think)
        barrier.wait(CONNECT_LIMIT)
        result.send(player.play(time.monotonic() + limit))
    except BenchmarkError as error:
        result.send(error)
        barrier.abort()
    except threading.BrokenBarrierError:
        return  # another one failed


class _Vm:
    """Where one VM is in the trace."""

    __slots__ = ("asked", "began", "checksum", "disk", "ended", "first", "header", "index", "sock", "wanted")

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.sock = NbdDisk(disk.socket, disk.vm).sock
        self.sock.setblocking(False)
        self.index = 0
        self.asked = self.began = self.ended = 0.0
        self.first = False  # whether the read that is under way is the host's first of its range
        self.wanted = 0  # bytes of the reply that have not come yet
        self.header = b""
        self.checksum = 0


class _Player:
    """Plays the reads on the disks of one process."""

    def __init__(self, disks: Sequence[Disk], reads: Sequence[Read], think: float) -> None:
        self._reads = reads
        self._gaps = [0.0, *(think * (read.at - before.at) for before, read in pairwise(reads))]
        self._vms = {vm.sock.fileno(): vm for vm in map(_Vm, disks)}
        self._buffer = memoryview(bytearray(_REPLY.size + max(read.length for read in reads)))
        self._due: list[tuple[float, int]] = []
        hosts = {disk.host for disk in disks}
        self._times = {host: HostTimes([0.0] * len(reads), [0.0] * len(reads)) for host in hosts}
        self._waits = {host: array.array("d") for host in hosts}
        self._left = len(self._vms)

    def play(self, deadline: float) -> Replay:
        """Play everything. Raises DiskFailed, TookTooLong."""
        with select.epoll() as poll:
            for fd, vm in self._vms.items():
                poll.register(fd, select.EPOLLIN)
                vm.began = time.monotonic()
                self._next(fd, vm)
            while self._left:
                now = time.monotonic()
                if now > deadline:
                    raise TookTooLong(f"{self._left} VMs had not read their whole boot when time was up")
                while self._due and self._due[0][0] <= now:
                    _, fd = heapq.heappop(self._due)
                    self._ask(self._vms[fd])
                soonest = min(self._due[0][0] if self._due else deadline, deadline)
                for fd, _ in poll.poll(max(0.0, soonest - now)):
                    self._take(fd, self._vms[fd])
        return self._result()

    def _next(self, fd: int, vm: _Vm) -> None:
        if vm.index == len(self._reads):
            vm.ended = time.monotonic()
            self._left -= 1
        elif self._gaps[vm.index] > 0:
            heapq.heappush(self._due, (time.monotonic() + self._gaps[vm.index], fd))
        else:
            self._ask(vm)

    def _ask(self, vm: _Vm) -> None:
        read = self._reads[vm.index]
        vm.asked = time.monotonic()
        times = self._times[vm.disk.host]
        if not times.first_asked[vm.index]:
            times.first_asked[vm.index] = vm.asked
            vm.first = True
        vm.wanted, vm.header = _REPLY.size + read.length, b""
        # One small request at a time always fits into an empty socket buffer.
        vm.sock.sendall(_REQUEST.pack(_REQUEST_MAGIC, 0, _READ, vm.index, read.offset, read.length))

    def _take(self, fd: int, vm: _Vm) -> None:
        got = self._receive(vm)
        vm.wanted -= got
        data = self._buffer[:got]
        if len(vm.header) < _REPLY.size:
            missing = _REPLY.size - len(vm.header)
            vm.header += data[:missing]
            data = data[missing:]
            if len(vm.header) < _REPLY.size:
                return
            check_reply(vm.header, vm.index, vm.disk.vm)
        if vm.disk.verify:
            vm.checksum = zlib.crc32(data, vm.checksum)
        if vm.wanted == 0:
            self._answered(vm)
            vm.index += 1
            self._next(fd, vm)

    def _receive(self, vm: _Vm) -> int:
        try:
            got = vm.sock.recv_into(self._buffer[: max(vm.wanted, 1)])
        except OSError as error:
            raise DiskFailed(f"{vm.disk.vm}: {error}") from error
        if not got:
            raise DiskFailed(f"{vm.disk.vm}: the server hung up")
        return got

    def _answered(self, vm: _Vm) -> None:
        waited = time.monotonic() - vm.asked
        self._waits[vm.disk.host].append(waited)
        if vm.first:
            self._times[vm.disk.host].first_waited[vm.index] = waited
            vm.first = False

    def _result(self) -> Replay:
        played = [
            Played(vm.disk.vm, vm.disk.host, vm.began, vm.ended, vm.checksum if vm.disk.verify else None)
            for vm in self._vms.values()
        ]
        for vm in self._vms.values():
            vm.sock.close()
        return Replay(played, self._times, self._waits, time.process_time())
