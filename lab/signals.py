"""Makes SIGTERM unwind the program as Ctrl-C does, so that context managers clean up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def terminating_is_interrupting() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt in the main thread."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
