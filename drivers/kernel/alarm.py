"""What a thread that watches maps waits for: an event of device-mapper, or that it is woken."""

from __future__ import annotations

import contextlib
import os
import select

from drivers.kernel.dmioctl import Events


class Alarm:
    """For one thread that waits, and others that ring."""

    def __init__(self) -> None:
        """Raises OSError without device-mapper."""
        self._events = Events()
        try:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            self._events.close()
            raise
        self._poller = select.poll()
        self._poller.register(self._events, select.POLLIN)
        self._poller.register(self._bell, select.POLLIN)

    def arm(self) -> None:
        """Wait for events from now on. To be called before maps are looked at, so that none is missed."""
        self._events.arm()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for an event of any map, or a ring. False if neither came within ``seconds``."""
        if not self._poller.poll(None if seconds is None else seconds * 1000):
            return False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return True

    def ring(self) -> None:
        """Wake who waits, or will wait next."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Nobody waits or rings any more."""
        self._events.close()
        os.close(self._bell)
