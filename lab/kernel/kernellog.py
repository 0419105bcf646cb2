"""Looks for what must never be in a guest's kernel log."""

from __future__ import annotations

import re

TROUBLE = re.compile(
    r"BUG:|Oops|general protection fault|WARNING: CPU|Call Trace|INFO: task .* blocked|possible circular locking"
    r"|rcu.* self-detected stall|Kernel panic|Buffer I/O error|blk_update_request: .*error|I/O error, dev|EXT4-fs error"
)
"""Linux: lib/bug.c, kernel/hung_task.c, kernel/locking/lockdep.c, block/blk-core.c."""

_WARNING = re.compile(r"^-+\[ cut here \]-+\n.*?^---\[ end trace \w+ \]---\n", re.MULTILINE | re.DOTALL)
_SESSION_ENDS = re.compile(
    r"__iscsi_unbind_session( \[\w+\])? is flushing !WQ_MEM_RECLAIM \w+:(scsi_evt_thread|pm_runtime_work)( \[\w+\])?$",
    re.MULTILINE,
)
_CANCELLED = "__cancel_work_timer"
_POWER_WORK_FLUSHED = re.compile(
    r"pm:pm_runtime_work$.*^ flush_work\+.*^ pm_runtime_remove\+.*^ scsi_remove_target\+", re.MULTILINE | re.DOTALL
)
_HEADS = ("WARNING: CPU", "Call Trace")


def troubles(kernel_log: str) -> list[str]:
    """The lines that tell of an oops, a hung task, a lock order, or an I/O error; a warning's with its whole trace."""
    found: list[str] = []
    end = 0
    for warning in _WARNING.finditer(kernel_log):
        found += [*_told(kernel_log[end : warning.start()]), *_told_by(warning[0])]
        end = warning.end()
    return found + _told(kernel_log[end:])


def _told(text: str) -> list[str]:
    return [line for line in text.splitlines() if TROUBLE.search(line)]


def _told_by(warning: str) -> list[str]:
    if _is_false_alarm(warning):
        return [line for line in _told(warning) if not line.startswith(_HEADS)]
    return warning.splitlines()


def _is_false_alarm(warning: str) -> bool:
    """Whether it is of work that the end of an iSCSI session ends with its disks, while it is running.

    Work that is cancelled, not flushed: kernels before 6.13 warn of that too (Linux: kernel/workqueue.c,
    check_flush_dependency, from_cancel; traced: these two, drivers/scsi/scsi_sysfs.c, drivers/base/power/runtime.c).
    And the target's power work, which is flushed (pm_runtime_remove). The kernel fears that the session's queue, which
    frees memory, waits for work that needs some; through an image's disks nothing is written, so none waits for them.
    """
    warnings = [line for line in warning.splitlines() if "WARNING: CPU" in line]
    return (
        len(warnings) == 1
        and "check_flush_dependency" in warnings[0]
        and _SESSION_ENDS.search(warning) is not None
        and (_CANCELLED in warning or _POWER_WORK_FLUSHED.search(warning) is not None)
    )
