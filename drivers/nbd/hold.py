"""An NBD server that greets and tells an export's size, and answers no request: where a daemon waits for its parents.

A daemon cannot open its graph without a parent that tells the size. When no parent lives (after a reboot, say, with the
origin down) it opens this instead and serves what its cache holds. Its misses wait here; when this server hangs up,
QEMU's NBD client connects again at once, by a symlink that leads to a parent by then, and sends them there.

The protocol is https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md (fixed newstyle negotiation). No
option is granted but NBD_OPT_INFO and NBD_OPT_GO, which a client has to cope with.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from drivers.host.watch import Watch

log = logging.getLogger(__name__)

_GREETING = b"NBDMAGICIHAVEOPT"
_FIXED_NEWSTYLE, _NO_ZEROES = 1, 2
_OPTION = struct.Struct(">8sII")
_REPLY = struct.Struct(">QIII")
_REPLY_MAGIC = 0x3E889045565A9
_OPT_ABORT, _OPT_INFO, _OPT_GO = 2, 6, 7
_REP_ACK, _REP_INFO, _REP_ERR_UNSUP = 1, 3, (1 << 31) + 1
_INFO_EXPORT = struct.Struct(">HQH")
_HAS_FLAGS, _READ_ONLY = 1, 2
_LONGEST_OPTION = 64 << 10
_HANDSHAKE_TIMEOUT = 5.0


class HoldingServer:
    """Listens at ``path`` and holds every client of an export of ``size`` bytes until it is closed."""

    def __init__(self, path: Path, size: int) -> None:
        self._size = size
        self._path = path
        self._lock = threading.Lock()
        self._clients: list[socket.socket] = []
        self._closed = threading.Event()
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(path))
            self._listener.listen()
            self._thread = Watch(f"hold-{path.name}", self._accept, self._closed)
            self._thread.start()
        except BaseException:
            self._listener.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up on everybody. Their symlink should lead elsewhere by now."""
        with self._lock:
            self._closed.set()
            for client in self._clients:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
                client.close()
        self._path.unlink(missing_ok=True)
        # Closing a socket does not wake a thread that waits in accept(); shutting it down does (Linux).
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                if self._closed.is_set():
                    return
                raise  # the clients that wait are let in when this begins again
            with self._lock:
                if self._closed.is_set():
                    client.close()
                    return
                self._clients.append(client)
            try:
                client.settimeout(_HANDSHAKE_TIMEOUT)
                self._negotiate(client)
                client.settimeout(None)
            except (OSError, ConnectionError, ValueError) as error:
                log.info("a client of %s went away: %s", self._path, error)
                with self._lock:
                    client.close()
                    self._clients = [other for other in self._clients if other is not client]

    def _negotiate(self, client: socket.socket) -> None:
        client.sendall(_GREETING + struct.pack(">H", _FIXED_NEWSTYLE | _NO_ZEROES))
        _receive(client, 4)
        option = None
        while option != _OPT_GO:
            magic, option, length = _OPTION.unpack(_receive(client, _OPTION.size))
            if magic != b"IHAVEOPT" or length > _LONGEST_OPTION:
                raise ValueError(f"not an option: {magic!r}")
            _receive(client, length)
            if option in (_OPT_INFO, _OPT_GO):
                _reply(client, option, _REP_INFO, _INFO_EXPORT.pack(0, self._size, _HAS_FLAGS | _READ_ONLY))
                _reply(client, option, _REP_ACK)
            elif option == _OPT_ABORT:
                raise ConnectionError("it asked to end")
            else:
                _reply(client, option, _REP_ERR_UNSUP)


def _receive(client: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = client.recv(length - len(data))
        if not part:
            raise ConnectionError("it hung up")
        data += part
    return data


def _reply(client: socket.socket, option: int, kind: int, data: bytes = b"") -> None:
    client.sendall(_REPLY.pack(_REPLY_MAGIC, option, kind, len(data)) + data)
