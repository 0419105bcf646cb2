"""As whom commands run on the stand's hosts."""

from __future__ import annotations

import functools
import pwd
import subprocess
import sys
from collections.abc import Sequence

RETURN = ("setuid", "setgid")
"""Capabilities to become root by, without root's other rights: who enters a host from another one needs that."""
READ = "dac_read_search"


def become(user: str) -> list[str]:
    """The words before a command to run it as a user, in no group but his own.

    He can become root again by these words, and has no other right of root's; but he reads all if he cannot read this
    checkout, which then lies in a folder of root's.
    """
    if user == "root":
        return _setpriv(user, ())
    return _setpriv(user, RETURN if _reads_checkout(user) else (*RETURN, READ))


def _setpriv(user: str, capabilities: Sequence[str]) -> list[str]:
    words = ["setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups"]
    kept = ",".join(f"+{name}" for name in capabilities)
    return [*words, f"--inh-caps={kept}", f"--ambient-caps={kept}"] if kept else words


@functools.cache
def _reads_checkout(user: str) -> bool:
    argv = [*_setpriv(user, ()), sys.executable, "-c", "import virtman.cli"]
    return subprocess.run(argv, stderr=subprocess.DEVNULL, check=False).returncode == 0
