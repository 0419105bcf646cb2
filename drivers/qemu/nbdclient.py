"""An NBD client over a connected unix socket: it reads, writes, zeroes and flushes one export.

The protocol is https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md (fixed newstyle negotiation, simple
replies).
"""

from __future__ import annotations

import os
import socket
import struct
from types import TracebackType
from typing import Self

from drivers.errors import NbdFailed

_GREETING = b"NBDMAGICIHAVEOPT"
_FIXED_NEWSTYLE, _NO_ZEROES = 1, 2

_OPTION = b"IHAVEOPT"
_OPTION_REPLY_MAGIC = 0x3E889045565A9
_OPT_GO = 7
_REP_ACK, _REP_INFO, _REP_ERROR = 1, 3, 1 << 31
_INFO_EXPORT = 0
_LONGEST_REPLY = 64 << 10

_REQUEST_MAGIC, _REPLY_MAGIC = 0x25609513, 0x67446698
_READ, _WRITE, _DISCONNECT, _FLUSH, _WRITE_ZEROES = 0, 1, 2, 3, 6
_MOST_ZEROES = 1 << 30
"""Bytes of zeros that one request writes; its field has 32 bits."""


class Client:
    """A connection to one export of an NBD server. The client closes the socket.

    ``size``: of the export, in bytes. ``timeout``: seconds for each wait for the server. All calls raise NbdFailed, and
    OSError if the server says why it could not do what was asked.
    """

    def __init__(self, sock: socket.socket, export: str, *, timeout: float) -> None:
        sock.settimeout(timeout)
        self._sock = sock
        try:
            self._greet()
            self.size = self._go(export.encode())
        except BaseException:
            sock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        """Say goodbye and hang up."""
        try:
            self._send(_request(_DISCONNECT, 0, 0))
        except NbdFailed:
            pass  # it hung up first
        finally:
            self._sock.close()

    def read(self, offset: int, length: int) -> bytes:
        """What a range holds."""
        self._ask(_request(_READ, offset, length))
        return self._receive(length)

    def write(self, offset: int, data: bytes) -> None:
        """Let a range hold this."""
        self._ask(_request(_WRITE, offset, len(data)), data)

    def zero(self, offset: int, length: int) -> None:
        """Let a range hold zeros."""
        for start in range(offset, offset + length, _MOST_ZEROES):
            self._ask(_request(_WRITE_ZEROES, start, min(_MOST_ZEROES, offset + length - start)))

    def flush(self) -> None:
        """Let what was written be there after a power cut."""
        self._ask(_request(_FLUSH, 0, 0))

    def _greet(self) -> None:
        greeting = self._receive(18)
        flags = int.from_bytes(greeting[16:], "big")
        if greeting[:16] != _GREETING or not flags & _FIXED_NEWSTYLE:
            raise NbdFailed(f"it greets with {greeting.hex()}")
        self._send(struct.pack(">I", flags & (_FIXED_NEWSTYLE | _NO_ZEROES)))

    def _go(self, export: bytes) -> int:
        """Begin with the requests. Returns the size of the export."""
        body = struct.pack(">I", len(export)) + export + struct.pack(">H", 0)
        self._send(_OPTION + struct.pack(">II", _OPT_GO, len(body)) + body)
        size = None
        while True:
            magic, option, kind, length = struct.unpack(">QIII", self._receive(20))
            if magic != _OPTION_REPLY_MAGIC or option != _OPT_GO or length > _LONGEST_REPLY:
                raise NbdFailed(f"reply {magic:#x} to option {option}")
            data = self._receive(length)
            if kind & _REP_ERROR:
                raise NbdFailed(f"it refuses ({kind:#x}): {data.decode(errors='replace')}")
            if kind == _REP_INFO and int.from_bytes(data[:2], "big") == _INFO_EXPORT:
                size = int.from_bytes(data[2:10], "big")
            if kind == _REP_ACK:
                if size is None:
                    raise NbdFailed("it tells no size")
                return size

    def _ask(self, request: bytes, data: bytes = b"") -> None:
        """Send a request with its data, and wait for the reply."""
        self._send(request)
        self._send(data)
        magic, error, _ = struct.unpack(">IIQ", self._receive(16))
        if magic != _REPLY_MAGIC:
            raise NbdFailed(f"reply {magic:#x} to a request")
        if error:  # the protocol's numbers are those of Linux
            raise OSError(error, f"the NBD server: {os.strerror(error)}")

    def _send(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise NbdFailed(str(error)) from error

    def _receive(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            try:
                part = self._sock.recv(length - len(data))
            except OSError as error:
                raise NbdFailed(str(error)) from error
            if not part:
                raise NbdFailed("it hung up")
            data += part
        return bytes(data)


def _request(command: int, offset: int, length: int) -> bytes:
    """One request at a time is on its way, so none needs a number."""
    return struct.pack(">IHHQQI", _REQUEST_MAGIC, 0, command, 0, offset, length)
