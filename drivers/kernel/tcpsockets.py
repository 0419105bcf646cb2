"""What the kernel knows of TCP connections, and how one is ended from outside (Linux: inet_diag.h, sock_diag(7)).

A connection whose other end lost its power looks alive until something that was sent stays without an answer. TCP sees
that first: it sends again after 0.2 s or so, and each time waits twice as long.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY, _SOCK_DESTROY = 20, 21
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_ESTABLISHED = 1 << 1
_WITH_TCP_INFO = 1 << 1
_INET_DIAG_INFO = 2
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_QUERY = struct.Struct("=BBBxI48s")  # inet_diag_req_v2
_ID_AT, _ID_LENGTH = 4, 48  # inet_diag_sockid in an inet_diag_msg
_ENDS = struct.Struct("!HH16s16s")  # its ports and addresses
_MESSAGE = 72  # length of an inet_diag_msg
_TIMER_AT, _EXPIRES_AT = 2, 52  # where it has which timer runs, and for how many milliseconds more
_TO_SEND_AGAIN = 1
_RETRANSMITS, _UNACKED, _LAST_SENT, _LAST_ACK_RECEIVED = 2, 24, 44, 56  # where tcp_info has them
_PATIENCE = 2.0

_LIVE = 0.5
"""Seconds within which a live host acknowledges (RFC 9293, 3.8.6.3)."""

_SENDINGS = 2
"""How often a segment was sent again before its connection can be called silent: never on a line that only is slow."""


@dataclass(frozen=True)
class Link:
    """A connection to a server, by its IP address and port and this host's ``local_port``."""

    ip: str
    port: int
    local_port: int


def is_silent(link: Link, seconds: float) -> bool:
    """Whether the server has acknowledged nothing for that long, though it was asked repeatedly.

    That says nothing of whose fault it is: the way there may be silent for a moment. Raises OSError, also where the
    kernel cannot tell.
    """
    return any(silent(info, seconds) for _, info in _of_link(link))


def awaits_acknowledgement(link: Link) -> bool:
    """Whether a server owes TCP an answer that a live one would have given. Raises OSError as ``is_silent``."""
    return any(unacknowledged(info) for _, info in _of_link(link))


def sends_again_within(link: Link, seconds: float) -> bool:
    """Whether TCP will by then send once more what nobody has acknowledged. Raises OSError as ``is_silent``."""
    return any(is_due(message, seconds) for message, _ in _of_link(link))


def end(link: Link) -> None:
    """End a connection, if it is there: both its ends are told. Raises OSError, also where the kernel cannot do it."""
    for message, _ in list(_of_link(link)):
        try:
            list(_ask(_SOCK_DESTROY, _ACK, _family(link.ip), _id_of(message)))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTCONN):  # else it has ended by itself, or for another
                raise


def connected(ip: str, port: int) -> bool:
    """Whether there is an established connection to a server. Raises OSError, also where the kernel cannot tell."""
    return any(_connections(ip, port))


def silent(info: bytes, seconds: float) -> bool:
    """Whether what the kernel tells of a connection, a tcp_info, means that."""
    (waited,) = struct.unpack_from("=I", info, _LAST_ACK_RECEIVED)
    return info[_RETRANSMITS] >= _SENDINGS and waited >= 1000 * seconds


def unacknowledged(info: bytes) -> bool:
    """Whether a tcp_info has a segment that was sent again, or one that nobody acknowledged for longer than a live host
    may take.
    """
    (segments,), (since,) = (struct.unpack_from("=I", info, at) for at in (_UNACKED, _LAST_SENT))
    return bool(segments) and (info[_RETRANSMITS] > 0 or since >= 1000 * _LIVE)


def is_due(message: bytes, seconds: float) -> bool:
    """Whether what the kernel tells of a connection, an inet_diag_msg, means that it sends again within this time."""
    (left,) = struct.unpack_from("=I", message, _EXPIRES_AT)
    return message[_TIMER_AT] == _TO_SEND_AGAIN and left <= 1000 * seconds


def _of_link(link: Link) -> Iterator[tuple[bytes, bytes]]:
    return _connections(link.ip, link.port, link.local_port)


def _id_of(message: bytes) -> bytes:
    return message[_ID_AT : _ID_AT + _ID_LENGTH]


def _connections(ip: str, port: int, local_port: int = 0) -> Iterator[tuple[bytes, bytes]]:
    """The inet_diag_msg and the tcp_info of each established connection to a server, or of that from a port."""
    nobody, server = bytes(16), ipaddress.ip_address(ip).packed.ljust(16, b"\0")
    like = _ENDS.pack(local_port, port, nobody, nobody).ljust(_ID_LENGTH, b"\0")  # the kernel compares the ports alone
    for message in _ask(_SOCK_DIAG_BY_FAMILY, _DUMP, _family(ip), like):
        info = _attribute(message, _INET_DIAG_INFO)
        if _ENDS.unpack_from(_id_of(message))[3] == server and info:
            yield message, info


def _family(ip: str) -> int:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def _ask(kind: int, flags: int, family: int, where: bytes) -> Iterator[bytes]:
    """The kernel's answers. Raises OSError."""
    query = _QUERY.pack(family, socket.IPPROTO_TCP, _WITH_TCP_INFO, _ESTABLISHED, where)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as door:
        door.settimeout(_PATIENCE)
        door.send(_HEADER.pack(_HEADER.size + len(query), kind, _REQUEST | flags, 0, 0) + query)
        while True:
            data = door.recv(1 << 16)
            while data:
                length, said, *_ = _HEADER.unpack_from(data)
                body, data = data[_HEADER.size : length], data[-(-length // 4) * 4 :]
                if said == _NLMSG_ERROR:
                    _check(body)
                if said in (_NLMSG_ERROR, _NLMSG_DONE):
                    return
                yield body


def _check(body: bytes) -> None:
    """Raise the error that the kernel answered, if it is one: 0 acknowledges."""
    (code,) = struct.unpack_from("=i", body)
    if code:
        raise OSError(-code, os.strerror(-code))


def _attribute(message: bytes, wanted: int) -> bytes:
    """The value of a netlink attribute behind an inet_diag_msg; empty if it is not there."""
    rest = message[_MESSAGE:]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        if kind == wanted:
            return rest[4:length]
        rest = rest[-(-length // 4) * 4 :]
    return b""
