"""What the kernel logs during a call, for errors whose reason is nowhere else (Linux: ABI/testing/dev-kmsg)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

_KMSG = Path("/dev/kmsg")
_LONGEST = 8192
"""Bytes of a record, and more."""


@contextmanager
def listening(kmsg: Path = _KMSG) -> Iterator[Callable[[], list[str]]]:
    """Within it a call returns the lines that were said since the last one; none where the log cannot be read."""
    with ExitStack() as opened:
        try:
            fd = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            os.lseek(fd, 0, os.SEEK_END)
        except OSError as error:
            log.warning("the kernel's log cannot be read: %s", error)
            yield list
        else:
            yield lambda: list(_lines(fd))


def _lines(fd: int) -> Iterator[str]:
    """Each record is read by a call of its own: ``level,number,time,flags;line``, and properties in lines below."""
    while True:
        try:
            record = os.read(fd, _LONGEST)
        except BlockingIOError:
            return
        except BrokenPipeError:  # what was next has been overwritten
            continue
        if not record:
            return
        yield record.decode(errors="replace").partition(";")[2].partition("\n")[0]
