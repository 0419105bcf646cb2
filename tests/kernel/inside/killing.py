"""A process that dies at work, before or after one of the programs that it runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from drivers.host.command import run, tool

_KILLER = """#!/bin/sh
# Kill who calls, before or after the call that is due.
echo >> {calls}
[ $(wc -l < {calls}) = {when} ] || exec {tool} "$@"
[ {before} = 1 ] || {tool} "$@" > /dev/null 2>&1
kill -9 $PPID
"""


def killed_at(number: int, call: Callable[[], object], folder: Path, *, before: bool) -> int:
    """Make the call in another process, which dies before, or after, this one of its calls of dmsetup and losetup.

    Returns its exit code: 0 if it runs fewer. The programs' stand-ins lie in ``folder``.
    """
    folder.mkdir(exist_ok=True)
    calls = folder / "calls"
    calls.write_text("")
    for name in ("dmsetup", "losetup"):
        killer = folder / name
        killer.write_text(_KILLER.format(calls=calls, when=number, before=int(before), tool=tool(name)))
        killer.chmod(0o755)
    pid = os.fork()
    if not pid:
        _die_at_work(call, folder)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    run(["udevadm", "settle"])
    return code


def programs_run(folder: Path) -> int:
    """How many calls of dmsetup and losetup the last call of ``killed_at`` made that nobody killed."""
    return len((folder / "calls").read_text().splitlines())


def _die_at_work(call: Callable[[], object], folder: Path) -> NoReturn:
    """What the other process does."""
    code = 1
    try:
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
        call()
        code = 0
    finally:
        os._exit(code)
