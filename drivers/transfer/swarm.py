"""One host's part in a transfer by BitTorrent: a program of its own, so that libtorrent's threads end with it.

    swarm.py send|receive ADDRESS

It says its contact, reads one job, and says what comes of it: JSON, an object a line. It ends with standard input.

Only receivers are peers. The sender hands each piece to one of them at its *door*, and they spread it. As a peer it
would send two images: a peer sees what others have, but not what they are about to fetch. libtorrent's super seeding
begins ten seconds late: peer_connection::superseed_piece does nothing during a handshake.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import libtorrent as lt

FILE = "content"
"""Of the torrent, in the job's folder."""
HASH = 20
"""Bytes."""
NONE = 2**32 - 1
"""Instead of a piece's number: there is nothing for you now."""
MOST_PEERS = 5
"""Receivers that each connects to. As many connect to it, so in a large swarm any two are a few steps apart. With 30, a
hundred connections share a link, and 60 receivers took three times as long."""
NEAR = 3
"""Of these, the next in the list."""
SLOTS = 8
"""Pieces that a sender sends at once. The sooner one has arrived, the sooner it spreads."""
PREPARED = 20e6
"""Bytes a second that a sender reads and hashes at least, before it says anything."""
TICK, STALL = 0.2, 2.0
"""Seconds between looks at the torrent, and without news until a receiver asks for what was handed out before."""


@dataclass(frozen=True)
class Job:
    """See ``Terms``. ``sender`` is None for the sender. ``wanted``: pieces. ``patience``: seconds without news."""

    folder: str
    number: int
    length: int
    piece: int
    receivers: list[str]
    patience: float
    sender: str | None = None
    wanted: list[int] = field(default_factory=list)
    limit: int | None = None

    @property
    def file(self) -> Path:
        return Path(self.folder, FILE)

    @property
    def count(self) -> int:
        """Of the pieces."""
        return -(-self.length // self.piece)

    @property
    def width(self) -> int:
        """Bytes with a bit for each piece."""
        return -(-self.count // 8)

    def size(self, piece: int) -> int:
        """Bytes of a piece."""
        return min(self.piece, self.length - piece * self.piece)


def say(**words: Any) -> None:
    """Tell the agent."""
    print(json.dumps(words), flush=True)  # noqa: T201


def sha1(data: bytes) -> bytes:
    return hashlib.sha1(data, usedforsecurity=False).digest()


def keep_alive(connection: socket.socket, patience: float) -> None:
    """Have a connection fail if the other machine says nothing for so many seconds (tcp(7))."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connection.setsockopt(socket.IPPROTO_TCP, option, max(1, int(patience / 4)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(patience * 1000))


class Door(socketserver.ThreadingTCPServer):
    """Where receivers get the hashes of all pieces, and then pieces, until they are done.

    A question is a byte, 1 if what others got is welcome, and a bit for each piece that a receiver and its peers lack.
    The answer is a piece's number in four bytes, and the piece.
    """

    daemon_threads, request_queue_size = True, 1000

    def __init__(self, address: str) -> None:
        """Who comes waits until ``open``."""
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), socketserver.BaseRequestHandler)
        self.came = self.there = self.sent = 0
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(SLOTS)

    def open(self, job: Job, hashes: bytes) -> None:
        self._job, self._hashes = job, hashes
        self._fresh = (1 << job.count) - 1
        """Pieces that nobody has got."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        given: list[int] = []
        with self._lock:
            self.came, self.there = self.came + 1, self.there + 1
        try:
            keep_alive(request, self._job.patience)
            request.sendall(self._hashes)
            self._serve(request, given)
        except OSError:
            pass  # the receiver has died
        finally:
            with self._lock:
                self.there -= 1
                for piece in given:  # perhaps nobody else has it
                    self._fresh |= 1 << piece

    def _serve(self, request: socket.socket, given: list[int]) -> None:
        with request.makefile("rb") as asked, self._job.file.open("rb") as file:
            while len(question := asked.read(1 + self._job.width)) > self._job.width:
                piece = self._choose(int.from_bytes(question[1:], "little"), again=question[0] > 0)
                slot = piece != NONE and self._slots.acquire(timeout=1)  # who has them all may have died
                try:
                    request.sendall(piece.to_bytes(4, "little"))
                    if piece != NONE:
                        given.append(piece)
                        sent = request.sendfile(file, piece * self._job.piece, self._job.size(piece))
                        with self._lock:
                            self.sent += sent
                finally:
                    if slot:
                        self._slots.release()

    def _choose(self, lacking: int, *, again: bool) -> int:
        with self._lock:
            if fresh := lacking & self._fresh:
                piece = (fresh & -fresh).bit_length() - 1
                self._fresh ^= 1 << piece
                return piece
        pieces = [piece for piece in range(self._job.count) if again and lacking >> piece & 1]
        return random.choice(pieces) if pieces else NONE  # noqa: S311


def send(door: Door, job: Job) -> None:
    """Until all receivers are done, or none has come for too long."""
    with job.file.open("rb") as file:
        hashes = b"".join(map(sha1, iter(lambda: file.read(job.piece), b"")))
    door.open(job, hashes)
    news, came = time.monotonic(), 0
    while door.there or (door.came < len(job.receivers) and time.monotonic() - news < job.patience):
        if door.there or door.came > came:
            news, came = time.monotonic(), door.came
        say(sent=door.sent)
        time.sleep(TICK)
    say(sent=door.sent)
    say(done=True)


def settings(address: str) -> Any:
    """What differs from libtorrent's defaults, which are for many torrents of strangers on the internet."""
    names = ("dht", "lsd", "upnp", "natpmp", "incoming_utp", "outgoing_utp")
    return {
        **{f"enable_{name}": False for name in names},
        "listen_interfaces": f"[{address}]:0" if ":" in address else f"{address}:0",
        "alert_mask": lt.alert_category.error,
        "in_enc_policy": lt.enc_policy.disabled,
        "out_enc_policy": lt.enc_policy.disabled,
        "allow_multiple_connections_per_ip": True,  # hosts of a lab may have one address
        "unchoke_slots_limit": -1,  # of the default, 8, others wait 15 seconds for their turn
        "connections_limit": 8000,
        "connection_speed": 500,
        "listen_queue_size": 1000,
        "smooth_connects": False,
        "min_reconnect_time": 1,  # a receiver that has no torrent yet hangs up
        "max_failcount": 1000,
    }


class Peer:
    """A receiver."""

    def __init__(self, address: str) -> None:
        self._session = lt.session(settings(address), flags=0)  # no extensions: they exchange peers
        everybody = lt.ip_filter()  # else no limit is for private addresses
        for first, last in (("0.0.0.0", "255.255.255.255"), ("::", ":".join(8 * ["ffff"]))):  # noqa: S104
            everybody.add_rule(first, last, 1 << lt.session.global_peer_class_id)
        self._session.set_peer_class_filter(everybody)
        self.port = self._session.listen_port()
        self._here: frozenset[int] = frozenset()
        self._news = time.monotonic()

    def receive(self, job: Job, contact: str, sender: tuple[str, int]) -> None:
        """Until all that is wanted is there; then send on for ever, if that is anything. Raises OSError."""
        with socket.create_connection(sender, timeout=job.patience) as connection:
            connection.settimeout(job.patience + job.length / PREPARED)
            keep_alive(connection, job.patience)
            with connection.makefile("rb") as door:
                hashes = exactly(door, job.count * HASH)
                connection.settimeout(None)
                if job.wanted:
                    self._add(job, hashes)
                    self._connect(job, contact)
                    threading.Thread(target=self._fetch, args=(job, connection, door), daemon=True).start()
                    self._follow(job, hashes)
                    connection.shutdown(socket.SHUT_RDWR)
        say(done=True)
        while job.wanted:
            self._look()

    def _add(self, job: Job, hashes: bytes) -> None:
        """The torrent is of version 1: its hashes are all that a receiver lacks. To prove more is up to ``put``."""
        info: Any = {
            b"name": FILE.encode(), b"length": job.length, b"piece length": job.piece, b"pieces": hashes,
            b"private": 1, b"transfer": job.number,
        }  # fmt: skip
        params = lt.add_torrent_params()
        params.ti = lt.torrent_info(lt.bencode({b"info": info}))
        wanted = set(job.wanted)
        params.piece_priorities = [int(piece in wanted) for piece in range(job.count)]
        params.save_path, params.flags = job.folder, 0
        if job.limit:
            self._session.apply_settings({"download_rate_limit": max(1, job.limit - job.limit // len(job.receivers))})
        self._torrent = self._session.add_torrent(params)
        while self._torrent.status().state == lt.torrent_status.checking_resume_data:  # it takes no pieces yet
            self._look(0.01)

    def _connect(self, job: Job, contact: str) -> None:
        me, count = job.receivers.index(contact), len(job.receivers)
        for step in steps(count, job.number):
            address, port = json.loads(job.receivers[(me + step) % count])
            self._torrent.connect_peer((address, port))

    def _fetch(self, job: Job, connection: socket.socket, door: BinaryIO) -> None:
        """Get from the sender what no peer has, at a receiver's share of the limit at most."""
        wanted, fetched = frozenset(job.wanted), set[int]()
        begun, size = time.monotonic(), 0
        with suppress(OSError):  # the sender has ended, or the receiver is done
            while True:
                stalled = time.monotonic() - self._news > STALL
                lacking = wanted - self._here
                if not stalled:
                    lacking -= fetched.union(at for at, hosts in enumerate(self._torrent.piece_availability()) if hosts)
                connection.sendall(bytes([stalled]) + bits(lacking, job.width))
                piece = int.from_bytes(exactly(door, 4), "little")
                if piece == NONE:
                    time.sleep(TICK)
                    continue
                data = exactly(door, job.size(piece))
                self._torrent.add_piece(piece, data, 0)
                fetched.add(piece)
                size += len(data)
                if job.limit:
                    time.sleep(max(0.0, begun + size * len(job.receivers) / job.limit - time.monotonic()))

    def _follow(self, job: Job, hashes: bytes) -> None:
        """Tell of pieces when the file has them: libtorrent has them before they are written, and says not when."""
        wanted, received = frozenset(job.wanted), -1
        while self._here < wanted:
            self._look()
            status = self._torrent.status(lt.torrent_handle.query_pieces)
            new = wanted.intersection(at for at, here in enumerate(status.pieces) if here) - self._here
            if new := written(job, new, hashes):
                say(pieces=runs(new))
                self._here |= new
            if new or status.total_payload_download > received:
                received, self._news = status.total_payload_download, time.monotonic()
            if time.monotonic() - self._news > job.patience:
                raise OSError(f"nothing came for {job.patience:g} s")

    def _look(self, seconds: float = TICK) -> None:
        """A while later, say what was sent. Raises OSError for what has failed."""
        self._session.wait_for_alert(int(seconds * 1000))
        for alert in self._session.pop_alerts():
            if isinstance(alert, lt.file_error_alert | lt.torrent_error_alert):
                raise OSError(alert.message())
        say(sent=self._torrent.status().total_upload)


def steps(count: int, seed: int) -> list[int]:
    """How far in the list of receivers the peers are that each connects to.

    All draw the same ones, so that no two connect to each other. Most peers are the next in the list, in which hosts of
    one rack are together. The others are anywhere, so that any two hosts are a few steps apart.
    """
    near, far = range(1, count // 2 + 1)[:NEAR], range(1, count // 2 + 1)[NEAR:]
    return [*near, *random.Random(seed).sample(far, min(len(far), MOST_PEERS - NEAR))]  # noqa: S311


def exactly(door: BinaryIO, size: int) -> bytes:
    """So many bytes. Raises OSError at the connection's end."""
    data = door.read(size)
    if len(data) < size:
        raise OSError("the sender has ended")
    return data


def bits(pieces: Iterable[int], width: int) -> bytes:
    """A bit for each piece, in ``width`` bytes."""
    found = bytearray(width)
    for piece in pieces:
        found[piece // 8] |= 1 << piece % 8
    return bytes(found)


def runs(pieces: Iterable[int]) -> list[list[int]]:
    """Neighbours together: the first, and the one after the last."""
    found: list[list[int]] = []
    for piece in sorted(pieces):
        if found and found[-1][1] == piece:
            found[-1][1] += 1
        else:
            found.append([piece, piece + 1])
    return found


def written(job: Job, pieces: Iterable[int], hashes: bytes) -> frozenset[int]:
    """Those of the pieces that are in the file, if there is one yet."""
    found = set[int]()
    with suppress(FileNotFoundError), job.file.open("rb") as file:
        for piece in pieces:
            file.seek(piece * job.piece)
            if sha1(file.read(job.piece)) == hashes[piece * HASH : (piece + 1) * HASH]:
                found.add(piece)
    return frozenset(found)


def end_with_input() -> None:
    """The agent has ended."""
    sys.stdin.read()
    os._exit(0)


def main(role: str, address: str) -> None:
    door, peer = (Door(address), None) if role == "send" else (None, Peer(address))
    contact = json.dumps([address, door.server_address[1] if door else peer and peer.port])
    say(contact=contact)
    if line := sys.stdin.readline():
        threading.Thread(target=end_with_input, daemon=True).start()
        job = Job(**json.loads(line))
        try:
            if door:
                send(door, job)
            elif peer and job.sender:
                peer.receive(job, contact, tuple(json.loads(job.sender)))
        except (OSError, RuntimeError) as error:
            say(error=str(error))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
