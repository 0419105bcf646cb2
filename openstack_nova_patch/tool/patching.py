"""patch(1), for one file at a time, in a folder of our own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from openstack_nova_patch.tool import disk
from openstack_nova_patch.tool.errors import Refused
from openstack_nova_patch.tool.series import Change, Series

# force: do not ask, and do not take a patch that is there already for one that is to be taken out.
ARGV = ["patch", "--force", "--silent", "--fuzz=0", "--no-backup-if-mismatch", "--reject-file=-"]


def patched(content: bytes, series: Series, change: Change) -> bytes:
    """What the file holds after its patch; ``content`` is what it holds before. Raises Refused."""
    return _verified(_patch(content, series.folder / change.patch), change.after, series, change)


def unpatched(content: bytes, series: Series, change: Change) -> bytes:
    """The way back. Raises Refused."""
    return _verified(_patch(content, series.folder / change.patch, "--reverse"), change.before, series, change)


def _verified(content: bytes, wanted: str, series: Series, change: Change) -> bytes:
    if disk.digest(content) != wanted:
        raise Refused(f"{series.folder / change.patch} does not fit its checksums: get this repository anew")
    return content


def _patch(content: bytes, patch: Path, *options: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="virtman-nova-") as folder:
        old, new = Path(folder) / "old", Path(folder) / "new"
        old.write_bytes(content)
        argv = [*ARGV, *options, f"--output={new}", str(old), str(patch)]
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                env={**os.environ, "LC_ALL": "C"},
            )  # fmt: skip
        except FileNotFoundError:
            raise Refused("patch is not installed: apt install patch") from None
        if done.returncode != 0:
            said = " ".join((done.stdout + done.stderr).split())
            raise Refused(f"{patch} cannot be applied: {said[:200] or f'exit code {done.returncode}'}")
        return new.read_bytes()
