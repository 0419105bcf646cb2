"""An alarm for a thread that monitors maps: an event of device-mapper, or a wake-up by another thread."""

from __future__ import annotations

import contextlib
import os
import select

from drivers.kernel import dmioctl


class Alarm:
    """For one thread that waits, and others that ring."""

    def __init__(self) -> None:
        """Raises OSError, also without device-mapper."""
        with contextlib.ExitStack() as opened:
            self._control = os.open(dmioctl.CONTROL, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, self._control)
            self.arm()
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            opened.callback(os.close, self._bell)
            self._opened = opened.pop_all()
        self._poller = select.poll()
        self._poller.register(self._control, select.POLLIN)
        self._poller.register(self._bell, select.POLLIN)

    def arm(self) -> None:
        """Wait for events from now on. Call this before maps are checked, so that no event is missed."""
        dmioctl.arm(self._control)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for an event of any map, or a ring. False if neither came within ``seconds``."""
        if not self._poller.poll(None if seconds is None else seconds * 1000):
            return False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return True

    def ring(self) -> None:
        """Wake the thread that waits, or will wait next."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """No thread waits or rings any more."""
        self._opened.close()
