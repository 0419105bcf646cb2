"""Steps on hosts, by a stand-in for ssh that notes them and says what a test tells it to."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from unittest import mock

from testtools import TestCase

from opennebula_tm.driver.disks import Ref
from opennebula_tm.driver.nebula import Vm, VmDisk
from opennebula_tm.driver.remote import Hosts
from opennebula_tm.driver.settings import Settings
from tests.unit.opennebula_tm.scene import write
from tests.unit.virtman.scene import folder_for

SSH = r"""#!/bin/sh
# ssh OPTION... HOST COMMAND, where COMMAND is: sh -c SCRIPT virtman WAIT VIRTMAN ACTION ARGUMENT...
cd "$(dirname "$0")" || exit
while [ $# -gt 2 ]; do shift; done
host=$1
eval "set -- $2"
shift 6
printf '%s\037' "$host" "$@" >>notes
printf '\036' >>notes
case $1 in receive | restore | backup-begin | upload) cat >input ;; esac
[ ! -e "says/$host.$1" ] || . "./says/$host.$1"
"""


class StepsTestCase(TestCase):
    """A test with hosts that do nothing, but say what it tells them to."""

    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        write(self.folder / "ssh", SSH, 0o755)
        self.enterContext(mock.patch.dict(os.environ, SSH=str(self.folder / "ssh")))
        self.hosts = Hosts(Settings())
        self.datastores = self.folder / "datastores"

    def says(self, host: str, action: str, text: str = "", *, fails: bool = False) -> None:
        """What a host answers to an action from now on."""
        script = f"echo {shlex.quote(text)} >&2; exit 1" if fails else f"printf %s {shlex.quote(text)}"
        write(self.folder / "says" / f"{host}.{action}", script)

    def has(self, host: str, *, image: str = "img", path: str = "/dev/x", size: int = 1, snapshot: str = "") -> None:
        """A host has the disk that it is asked for, and a ``snapshot`` of it, if named."""
        snapshots = [{"name": snapshot, "parent": None, "current": False}] if snapshot else []
        disk = {"disk": {"path": path, "size": size, "image": image}}
        self.says(host, "describe", f"{json.dumps(disk)}\n{json.dumps(snapshots)}\n")

    def steps(self) -> list[list[str]]:
        """Host, action and arguments of the steps since the last call; of a command for another host only these."""
        notes = self.folder / "notes"
        found = notes.read_text().split("\036")[:-1] if notes.exists() else []
        notes.unlink(missing_ok=True)
        return [[_short(word) for word in step.split("\037")[:-1]] for step in found]

    def done(self) -> list[str]:
        """Host and action of the steps since the last call."""
        return [" ".join(step[:2]) for step in self.steps()]

    def at(self, host: str, datastore: int = 0, disk: int | None = 0) -> str:
        """A disk of VM 42, or its folder, as OpenNebula names it."""
        return f"{host}:{self.datastores}/{datastore}/42" + ("" if disk is None else f"/disk.{disk}")

    def lock(self, ref: Ref) -> list[str]:
        """The arguments for a disk's lock."""
        return [f"{self.datastores}/.virtman", f"{ref.vm}-{ref.number}"]


def vm_on(*hosts: str, state: int = 3, driver: str = "raw", tm_mad: str = "virtman") -> Callable[[int], Vm]:
    """What OpenNebula says of VM 42, which has been on these hosts and has a disk of each driver, ``a,b``."""
    disks = tuple(VmDisk(n, 1024, 1024, driver, name) for n, name in enumerate(tm_mad.split(",")))
    return lambda number: Vm(number, state, "one-42", hosts, disks)


def _short(word: str) -> str:
    return " ".join(shlex.split(word)[6:]) if word.startswith("sh -c ") else word
