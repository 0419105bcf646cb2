"""Looks for what must never be in a guest's kernel log."""

from __future__ import annotations

import re

TROUBLE = re.compile(
    r"BUG:|Oops|general protection fault|WARNING: CPU|Call Trace|INFO: task .* blocked|possible circular locking"
    r"|rcu.* self-detected stall|Kernel panic|Buffer I/O error|blk_update_request: .*error|I/O error, dev|EXT4-fs error"
)
"""Linux: lib/bug.c, kernel/hung_task.c, kernel/locking/lockdep.c, block/blk-core.c."""


def troubles(kernel_log: str) -> list[str]:
    """The lines that tell of an oops, a hung task, a lock order, or an I/O error."""
    return [line for line in kernel_log.splitlines() if TROUBLE.search(line)]
