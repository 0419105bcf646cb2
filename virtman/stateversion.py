"""The version of a state folder, in its file ``version``: an agent opens folders of one version only.

The number is not that of a release: it rises when a folder cannot be opened any more. From release 0.3.0 on that needs
a migration (tests/unit/virtman/test_golden.py).
"""

from __future__ import annotations

from pathlib import Path

from drivers.host.durable import write_atomically
from drivers.host.folders import matching
from virtman.errors import ConfigError
from virtman.hostfiles import translate_os_errors

VERSION = b"2\n"


def mark(state: Path) -> None:
    """Make the state folder, with its version before anything else in it.

    Raises ConfigError if the folder is of another version; HostTrouble, OSError.
    """
    state.mkdir(parents=True, exist_ok=True)
    if why := refusal(state):
        raise ConfigError(why)
    if not _file(state).exists():
        write_atomically(_file(state), VERSION)


def refusal(state: Path) -> str | None:
    """Why an agent of this version does not open the folder. Raises HostTrouble."""
    with translate_os_errors(f"reading the version of {state}"):
        written = _file(state).exists()
        if _file(state).read_bytes() == VERSION if written else not _is_used(state):
            return None
    return (
        f"another version of virtman wrote the state folder {state}: destroy its VMs and unpublish its images with"
        " that version, or start the agent with an empty --state"
    )


def has_records(state: Path) -> bool:
    """Whether the state folder has a record of something. Raises HostTrouble."""
    with translate_os_errors(f"looking for records in {state}"):
        return any(True for _ in matching(state / "records", "*", "[!.]*.json"))


def _is_used(state: Path) -> bool:
    """Whether an agent has used the folder. Raises OSError, HostTrouble."""
    return (state / "drivers.json").exists() or has_records(state)


def _file(state: Path) -> Path:
    return state / "version"
