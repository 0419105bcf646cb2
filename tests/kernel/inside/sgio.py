"""SCSI commands past the block layer, by the SG_IO call (Linux: include/scsi/sg.h)."""

from __future__ import annotations

import ctypes
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

_SG_IO = 0x2285
_NO_DATA, _TO_DEVICE = -1, -2
_TIMEOUT = 5000  # milliseconds
_SENSE_LENGTH = 32
_DESCRIPTOR_FORMATS = frozenset({0x72, 0x73})  # SPC-4, 4.5.1: the sense key is in byte 1 of these, in byte 2 of others


@dataclass(frozen=True)
class Answer:
    """As in SPC-4."""

    status: int
    sense_key: int


class _Header(ctypes.Structure):
    """Struct sg_io_hdr."""

    _fields_ = (
        ("interface_id", ctypes.c_int),
        ("dxfer_direction", ctypes.c_int),
        ("cmd_len", ctypes.c_ubyte),
        ("mx_sb_len", ctypes.c_ubyte),
        ("iovec_count", ctypes.c_ushort),
        ("dxfer_len", ctypes.c_uint),
        ("dxferp", ctypes.c_void_p),
        ("cmdp", ctypes.c_void_p),
        ("sbp", ctypes.c_void_p),
        ("timeout", ctypes.c_uint),
        ("flags", ctypes.c_uint),
        ("pack_id", ctypes.c_int),
        ("usr_ptr", ctypes.c_void_p),
        ("status", ctypes.c_ubyte),
        ("masked_status", ctypes.c_ubyte),
        ("msg_status", ctypes.c_ubyte),
        ("sb_len_wr", ctypes.c_ubyte),
        ("host_status", ctypes.c_ushort),
        ("driver_status", ctypes.c_ushort),
        ("resid", ctypes.c_int),
        ("duration", ctypes.c_uint),
        ("info", ctypes.c_uint),
    )


def send(disk: Path, command: bytes, data: bytes = b"") -> Answer:
    """Send a command, with ``data`` to write, and wait at most 5 s. Raises OSError."""
    out = ctypes.create_string_buffer(data, len(data) or 1)
    block = ctypes.create_string_buffer(command, len(command))
    sense = ctypes.create_string_buffer(_SENSE_LENGTH)
    header = _Header(
        interface_id=ord("S"),
        dxfer_direction=_TO_DEVICE if data else _NO_DATA,
        cmd_len=len(command),
        mx_sb_len=_SENSE_LENGTH,
        dxfer_len=len(data),
        dxferp=ctypes.addressof(out),
        cmdp=ctypes.addressof(block),
        sbp=ctypes.addressof(sense),
        timeout=_TIMEOUT,
    )
    fd = os.open(disk, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd, _SG_IO, header)
    finally:
        os.close(fd)
    key = sense.raw[1 if sense.raw[0] & 0x7F in _DESCRIPTOR_FORMATS else 2] & 0x0F
    return Answer(header.status, key)
