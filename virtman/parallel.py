"""Several acts at once, of which one that fails stops no other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from virtman.errors import VirtmanError

log = logging.getLogger(__name__)

AT_ONCE = 16


def side_by_side(acts: Sequence[Callable[[], None]]) -> list[Exception]:
    """Do all acts, whatever fails. Returns what was raised."""
    failed: list[Exception] = []
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="parallel") as pool:
        errors = [future.exception() for future in [pool.submit(act) for act in acts]]
    for error in errors:
        if isinstance(error, Exception):
            log.error("%s", error)
            failed.append(error)
        elif error is not None:
            raise error
    return failed


def raise_all(failed: Sequence[Exception]) -> None:
    """Raise VirtmanError with every error, if there is one."""
    if failed:
        raise VirtmanError("; ".join(str(error) for error in failed))
