"""A process that may open no more files."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def none_left() -> Iterator[None]:
    """Within it, whatever this process opens fails (EMFILE), in all its threads. What is open stays.

    Also what another thread closes meanwhile leaves no room: only the three standard files are below the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
