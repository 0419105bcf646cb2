"""What a host tells OpenNebula's scheduler: whether VirtMan works here, which images it holds, how much room there is.

Run by the probe im/kvm-probes.d/host/system/virtman.sh, where a failure would put the whole host into error: it always
prints something, ends with 0, and takes no longer than the agent may take to answer.

    VIRTMAN = "YES"            NO: no command, or no answer
    VIRTMAN_STATE = "ready"    or one word of trouble
    VIRTMAN_IMAGES = "one-17-0a1b2c3d,debian-12"
    VIRTMAN_IMAGE_17 = 812     MiB of OpenNebula's image 17 that need not be fetched: RANK = "VIRTMAN_IMAGE_17"
    DS = [ ID = 104, USED_MB = 1, TOTAL_MB = 2, FREE_MB = 1 ]     of each system datastore of the driver virtman
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20
PATIENCE = 5.0
"""Seconds that the agent has to answer."""
SOCKET = "/run/virtman/agent.sock"
BINARIES = "/usr/local/bin:/usr/bin:/bin"
DATASTORES = Path("/var/lib/one/datastores")
LOCATION = re.compile(r"<DATASTORE_LOCATION>\s*(?:<!\[CDATA\[)?\s*(/[^<\]]*)")
NAME = re.compile(r"one-(\d+)-[0-9a-f]+(?:-g(\d+))?")
"""Images that OpenNebula's datastore made, by OpenNebula's number, and how often their content was replaced."""
MOST = 500
"""Images that are named. The report is one UDP packet."""


def report(status: Mapping[str, Any] | None, datastores: Path) -> Iterator[str]:
    """The lines for a host whose agent gave this status, or none."""
    if status is None:
        yield 'VIRTMAN = "NO"'
        yield 'VIRTMAN_STATE = "silent"'
    else:
        yield 'VIRTMAN = "YES"'
        yield f'VIRTMAN_STATE = "{state(status)}"'
        yield from _images(status)
    yield from _capacities(status or {}, datastores)


def state(status: Mapping[str, Any]) -> str:
    """One word: ``ready``, or the first of what would keep VMs from starting here."""
    if _of(status, "disks").get("trouble"):
        return "disks"
    if not _of(status, "volt").get("connected"):
        return "unconnected"
    if status.get("damaged"):
        return "damaged"
    if any(not death.get("running") for death in _list(status, "deaths")):
        return "broken"
    return "repairing" if status.get("repairing") else "ready"


def _images(status: Mapping[str, Any]) -> Iterator[str]:
    held = {str(stack.get("name")): _held(stack) for stack in _list(status, "images")}
    names = sorted(held, key=lambda name: (-held[name], name))[:MOST]
    yield f'VIRTMAN_IMAGES = "{quoted(",".join(names))}"'
    newest: dict[str, tuple[int, int]] = {}
    for name in names:
        ours = NAME.fullmatch(name)
        if ours:
            found = int(ours[2] or 0), held[name]
            newest[ours[1]] = max(newest.get(ours[1], found), found)
    for number, (_, size) in newest.items():
        yield f"VIRTMAN_IMAGE_{number} = {size // MIB}"


def _held(stack: Mapping[str, Any]) -> int:
    """Bytes of the image that this host need not fetch."""
    return int(stack.get("size" if stack.get("role") == "origin" else "fetched_bytes") or 0)


def quoted(text: str) -> str:
    """Text that may stand between quotes in a template: what could end them, or the line, is replaced."""
    return re.sub(r'["\\\x00-\x1f\x7f\]\[]', "_", text)


def _capacities(status: Mapping[str, Any], datastores: Path) -> Iterator[str]:
    """A datastore is ours if it has our folder; one with a mark for OpenNebula's own probe is told of by that."""
    try:
        folders = sorted(folder for folder in datastores.iterdir() if folder.name.isascii() and folder.name.isdigit())
    except OSError:
        return
    for folder in folders:
        if (folder / ".virtman").is_dir() and not (folder / ".monitor").exists():
            used, total, free = _room(_of(status, "disks"), folder)
            yield f"DS = [ ID = {int(folder.name)}, USED_MB = {used}, TOTAL_MB = {total}, FREE_MB = {free} ]"


def _room(disks: Mapping[str, Any], folder: Path) -> tuple[int, int, int]:
    """MiB used, in all and free where the agent keeps VMs' disks; if it does not say, where the folder lies."""
    total, free = disks.get("total"), disks.get("free")
    if isinstance(total, int) and isinstance(free, int):
        return (total - free) // MIB, total // MIB, free // MIB
    room = shutil.disk_usage(folder)
    return room.used // MIB, room.total // MIB, room.free // MIB


def _of(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = status.get(name)
    return part if isinstance(part, dict) else {}


def _list(status: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    part = status.get(name)
    return [each for each in part if isinstance(each, dict)] if isinstance(part, list) else []


def ask(command: Sequence[str], patience: float = PATIENCE) -> dict[str, Any] | None:
    """What the agent says, or None if it says nothing of use in time."""
    argv, quiet = [*command, "status", "--json"], subprocess.DEVNULL
    try:
        with subprocess.Popen(
            argv, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, start_new_session=True
        ) as process:
            answer = _within(process, patience)
            status = json.loads(answer) if process.returncode == 0 else None
    except (OSError, ValueError):
        return None
    return status if isinstance(status, dict) else None


def _within(process: subprocess.Popen[bytes], patience: float) -> bytes:
    """What the process wrote; when its time is over it ends, with all that it started."""
    try:
        return process.communicate(timeout=patience)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def find(environment: Mapping[str, str]) -> list[str] | None:
    """The command, with the socket of this host's agent, or None: VirtMan is not installed."""
    command = shutil.which("virtman", path=f"{environment.get('PATH', '')}:{BINARIES}")
    return None if command is None else [command, "--socket", environment.get("VIRTMAN_SOCKET", SOCKET)]


def datastores_of(configuration: str) -> Path:
    """Where OpenNebula's configuration for probes says that datastores are."""
    found = LOCATION.search(configuration)
    return Path(found[1].strip()) if found else DATASTORES


def main() -> int:
    """Print the report. Standard input is OpenNebula's configuration for probes, in XML."""
    configuration = "" if sys.stdin.isatty() else sys.stdin.buffer.read().decode("utf-8", "replace")
    command = find(os.environ)
    lines = report(ask(command) if command else None, datastores_of(configuration))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
