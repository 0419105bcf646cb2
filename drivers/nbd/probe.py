"""A small NBD client over unix sockets: is somebody serving, how large is the export, which ranges does it hold; and to
read and write one.

The protocol is https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md (fixed newstyle negotiation,
structured replies, metadata contexts); QEMU's own context ``qemu:allocation-depth`` is in its docs/interop/nbd.rst.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from drivers.errors import NotServing, ProtocolViolated

ALLOCATION_DEPTH = "qemu:allocation-depth"
"""Metadata context whose value is the layer that holds an extent: 1 is the exported node, 2 its backing node, …"""

_GREETING = b"NBDMAGIC"
_OPTION = b"IHAVEOPT"
_FLAG_FIXED_NEWSTYLE = 1
_FLAG_NO_ZEROES = 2

_OPT_GO = 7
_OPT_STRUCTURED_REPLY = 8
_OPT_SET_META_CONTEXT = 10
_OPT_REPLY_MAGIC = 0x3E889045565A9
_REP_ACK = 1
_REP_INFO = 3
_REP_META_CONTEXT = 4
_REP_IS_ERROR = 1 << 31
_INFO_EXPORT = 0

_REQUEST_MAGIC = 0x25609513
_CMD_READ = 0
_CMD_WRITE = 1
_CMD_DISC = 2
_CMD_FLUSH = 3
_CMD_WRITE_ZEROES = 6
_CMD_BLOCK_STATUS = 7
_SIMPLE_REPLY_MAGIC = 0x67446698
_CHUNK_MAGIC = 0x668E33EF
_CHUNK_IS_LAST = 1
_CHUNK_BLOCK_STATUS = 5
_CHUNK_IS_ERROR = 1 << 15

_MOST_REPLY = 32 << 20  # the largest reply the protocol lets a client expect
_MOST_ASKED = 1 << 30  # bytes per request that carries no data; the field has 32 bits


@dataclass(frozen=True)
class Extent:
    """A range of an export, in bytes, and its value in the negotiated metadata context."""

    offset: int
    length: int
    value: int


def knock(path: Path) -> socket.socket:
    """A non-blocking connection to a unix socket; the server need not have greeted yet.

    Raises NotServing when nobody listens there, or when its backlog is full.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise NotServing(f"nobody listens at {path}: {error.strerror or error}") from error
    return sock


def listens(path: Path) -> bool:
    """Whether somebody listens at a unix socket, greeting or not."""
    try:
        knock(path).close()
    except NotServing as error:
        return isinstance(error.__cause__, BlockingIOError)  # a full backlog has a listener
    return True


class Client:
    """A connection to one export of an NBD server, negotiated and ready for requests.

    ``size`` is the export's size in bytes. ``timeout`` (seconds) limits each wait for the server. With ``context`` that
    metadata context is negotiated for ``extents``. A connection from ``knock`` can be handed in as ``sock``.

    Raises NotServing when nobody answers in time, ProtocolViolated when the server refuses.
    """

    def __init__(
        self, path: Path, export: str, *, timeout: float, context: str | None = None, sock: socket.socket | None = None
    ) -> None:
        self._path = path
        self._sock = sock or knock(path)
        self._sock.settimeout(timeout)
        self._context: int | None = None
        self._handle = 0
        try:
            self._greet()
            if context is not None:
                self._option(_OPT_STRUCTURED_REPLY, b"")
                self._context = self._set_context(export, context)
            self.size = self._go(export)
        except BaseException:
            self._sock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """For select and poll: readable means that the server hung up, as no request is outstanding."""
        return self._sock.fileno()

    def close(self) -> None:
        """Say goodbye and hang up."""
        if self._sock.fileno() != -1:
            try:
                self._request(_CMD_DISC, 0, 0)
            except NotServing:
                pass
            finally:
                self._sock.close()

    def read(self, offset: int, length: int) -> bytes:
        """A range of the export, in bytes. Only without ``context``. Raises NotServing, ProtocolViolated."""
        self.ask(offset, length)
        return self.answer(length)

    def ask(self, offset: int, length: int) -> None:
        """Ask for a range, and do not wait for it: ``answer`` does. Raises NotServing."""
        self._request(_CMD_READ, offset, length)

    def answer(self, length: int) -> bytes:
        """The range that was asked for last. Raises NotServing, ProtocolViolated."""
        magic, error, _ = struct.unpack(">IIQ", self._receive(16))
        if magic != _SIMPLE_REPLY_MAGIC or error:
            raise self._violation(f"reply {magic:#x} to a read, error {error}")
        return self._receive(length)

    def write(self, offset: int, data: bytes) -> None:
        """Let a range of the export hold this. Only without ``context``.

        Raises NotServing, ProtocolViolated, OSError if the server says why it could not.
        """
        self._request(_CMD_WRITE, offset, len(data))
        self._send(data)
        self._written()

    def zero(self, offset: int, length: int) -> None:
        """Let a range of the export, in bytes, hold zeros. Raises as ``write``."""
        for start in range(offset, offset + length, _MOST_ASKED):
            self._request(_CMD_WRITE_ZEROES, start, min(_MOST_ASKED, offset + length - start))
            self._written()

    def _written(self) -> None:
        magic, error, _ = struct.unpack(">IIQ", self._receive(16))
        if magic != _SIMPLE_REPLY_MAGIC:
            raise self._violation(f"reply {magic:#x} to a write")
        if error:  # the protocol's numbers are those of Linux
            raise OSError(error, os.strerror(error), str(self._path))

    def flush(self) -> None:
        """Have the server write down what it keeps in memory. Raises NotServing, ProtocolViolated."""
        self._request(_CMD_FLUSH, 0, 0)
        (magic,) = struct.unpack(">I", self._receive(4))
        if magic == _CHUNK_MAGIC:
            _, kind, _, length = struct.unpack(">HHQI", self._receive(16))
            self._receive(length)
            failed = bool(kind & _CHUNK_IS_ERROR)
        elif magic == _SIMPLE_REPLY_MAGIC:
            failed = struct.unpack(">IQ", self._receive(12))[0] != 0
        else:
            raise self._violation(f"reply magic {magic:#x}")
        if failed:
            raise self._violation("the flush failed")

    def extents(self) -> Iterator[Extent]:
        """The whole export as consecutive extents of the metadata context. Raises NotServing, ProtocolViolated."""
        offset = 0
        while offset < self.size:
            asked = min(self.size - offset, _MOST_ASKED)
            self._request(_CMD_BLOCK_STATUS, offset, asked)
            start = offset
            for told, value in self._block_status():
                # The last extent may reach beyond what was asked for, even beyond the export's end.
                length = min(told, self.size - offset)
                yield Extent(offset, length, value)
                offset += length
            if offset == start:
                raise self._violation("an empty block status")

    def _greet(self) -> None:
        greeting = self._receive(18)
        flags = int.from_bytes(greeting[16:], "big")
        if greeting[:16] != _GREETING + _OPTION or not flags & _FLAG_FIXED_NEWSTYLE:
            raise self._violation(f"greeting {greeting.hex()}")
        self._send(struct.pack(">I", flags & (_FLAG_FIXED_NEWSTYLE | _FLAG_NO_ZEROES)))

    def _go(self, export: str) -> int:
        name = export.encode()
        size = None
        for kind, data in self._option(_OPT_GO, struct.pack(">I", len(name)) + name + struct.pack(">H", 0)):
            if kind == _REP_INFO and int.from_bytes(data[:2], "big") == _INFO_EXPORT:
                size = int.from_bytes(data[2:10], "big")
        if size is None:
            raise self._violation("no size")
        return size

    def _set_context(self, export: str, context: str) -> int:
        name, query = export.encode(), context.encode()
        body = struct.pack(">I", len(name)) + name + struct.pack(">II", 1, len(query)) + query
        for kind, data in self._option(_OPT_SET_META_CONTEXT, body):
            if kind == _REP_META_CONTEXT and data[4:] == query:
                return int.from_bytes(data[:4], "big")
        raise self._violation(f"no metadata context {context}")

    def _option(self, option: int, body: bytes) -> list[tuple[int, bytes]]:
        """Send one option; its replies up to the acknowledgement."""
        self._send(_OPTION + struct.pack(">II", option, len(body)) + body)
        replies: list[tuple[int, bytes]] = []
        while True:
            magic, answered, kind, length = struct.unpack(">QIII", self._receive(20))
            if magic != _OPT_REPLY_MAGIC or answered != option or length > _MOST_REPLY:
                raise self._violation(f"reply {magic:#x} to option {answered}")
            data = self._receive(length)
            if kind & _REP_IS_ERROR:
                raise self._violation(f"option {option} refused ({kind:#x}): {data.decode(errors='replace')}")
            if kind == _REP_ACK:
                return replies
            replies.append((kind, data))

    def _request(self, command: int, offset: int, length: int) -> None:
        self._handle += 1
        self._send(struct.pack(">IHHQQI", _REQUEST_MAGIC, 0, command, self._handle, offset, length))

    def _block_status(self) -> list[tuple[int, int]]:
        extents: list[tuple[int, int]] = []
        last = False
        while not last:
            magic, flags, kind, _, length = struct.unpack(">IHHQI", self._receive(20))
            if magic != _CHUNK_MAGIC or length > _MOST_REPLY:
                raise self._violation(f"chunk magic {magic:#x}")
            last = bool(flags & _CHUNK_IS_LAST)
            data = self._receive(length)
            if kind & _CHUNK_IS_ERROR:
                raise self._violation(f"block status failed: {os.strerror(int.from_bytes(data[:4], 'big'))}")
            if kind == _CHUNK_BLOCK_STATUS and int.from_bytes(data[:4], "big") == self._context:
                extents += struct.iter_unpack(">II", data[4:])
        return extents

    def _send(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise NotServing(f"the server at {self._path} hung up: {error}") from error

    def _receive(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            try:
                part = self._sock.recv(length - len(data))
            except TimeoutError as error:
                raise NotServing(f"no answer at {self._path} within {self._sock.gettimeout():g} s") from error
            except OSError as error:
                raise NotServing(f"the server at {self._path} hung up: {error}") from error
            if not part:
                raise NotServing(f"the server at {self._path} hung up")
            data += part
        return bytes(data)

    def _violation(self, what: str) -> ProtocolViolated:
        return ProtocolViolated(f"the server at {self._path}: {what}")
