"""Wires that bring each packet late: for kernels without netem, which cannot delay by themselves.

A wire joins two TAP devices (Linux: Documentation/networking/tuntap.rst). Packets of up to 64 KiB cross it as the
kernel hands them down before it cuts them up, so one process is fast enough for gigabits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # if_tun.h
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 1, 2, 4
MOST = 65536 + 256
"""Bytes of a packet with its headers."""


def open_end(device: str) -> int:
    """Make a device where the calling thread is. It goes when the returned descriptor is closed. Raises OSError."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
        fcntl.ioctl(end, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    except OSError:
        os.close(end)
        raise
    return end


def carry(ends: Mapping[int, int], delay: float, until: int) -> None:
    """Bring what comes out of each end to the other one, ``delay`` seconds late, until ``until`` can be read."""
    late: deque[tuple[float, int, bytes]] = deque()
    while True:
        ready, _, _ = select.select([*ends, until], [], [], max(0.0, late[0][0] - time.monotonic()) if late else None)
        if until in ready:
            return
        for end in ready:
            with contextlib.suppress(BlockingIOError):
                late.append((time.monotonic() + delay, ends[end], os.read(end, MOST)))
        while late and late[0][0] <= time.monotonic():
            _, end, packet = late.popleft()
            with contextlib.suppress(OSError):  # a device that is down, or full, loses packets
                os.write(end, packet)


def main() -> None:
    """``wire.py DELAY END:END ...``, with ends as descriptors: carry until standard input ends."""
    ends: dict[int, int] = {}
    for pair in sys.argv[2:]:
        first, second = map(int, pair.split(":"))
        ends |= {first: second, second: first}
    carry(ends, float(sys.argv[1]), sys.stdin.fileno())


if __name__ == "__main__":
    main()
