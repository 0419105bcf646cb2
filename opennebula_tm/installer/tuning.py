"""Which settings cap a wave of VMs, what they are now, and what to set them to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opennebula_tm.installer import disk
from opennebula_tm.installer.template import Attribute, attributes


@dataclass(frozen=True)
class Cap:
    """A setting: where it stands, its value now (its default, if it is not set), a value for waves, and why."""

    place: str
    name: str
    now: str
    wanted: str
    why: str

    def __str__(self) -> str:
        return f"{self.place}: {self.name} is {self.now}; for a wave {self.wanted}: {self.why}"


SINGLE = (
    (
        "MAX_ACTIONS_PER_HOST",
        "1",
        "20",
        "so many VMs a pass start on a host; the pass ends at the first host that has them",
    ),
    ("MAX_ACTIONS_PER_CLUSTER", "30", "400", "so many VMs a pass start in a cluster"),
    ("MANAGER_TIMER", "15", "5", "seconds from one pass to the next, for the VMs that it left over"),
    ("SCHED_MAX_WND_TIME", "10", "2", "seconds that requests are gathered before a pass"),
    ("SCHED_MAX_WND_LENGTH", "7", "50", "a pass begins before that when so many VMs wait"),
)
THREADS = (
    ("TM_MAD", "one_tm", "transfers at the same time on all hosts"),
    ("VM_MAD", "one_vmm_exec", "VMs that are started at the same time; -p lets one host start several"),
    ("DATASTORE_MAD", "one_datastore", "images that are added or deleted at the same time"),
)
WANTED_THREADS = "60"
SSHD = (
    ("MaxSessions", "10", "64", "calls at the same time over the one connection that is kept to a host"),
    (
        "MaxStartups",
        "10:30:100",
        "100:30:300",
        "connections that are being opened at the same time, before sshd drops some",
    ),
)


def caps(oned: Path, sshd: Path) -> Iterator[Cap]:
    """All caps. Raises Refused if oned.conf is not understood. ``sshd`` is this machine's; those of hosts count."""
    known = list(attributes(disk.as_text(disk.read(oned) or b"")))
    for name, default, wanted, why in SINGLE:
        values = [a.value.text for a in known if a.name == name and a.value]
        yield Cap(str(oned), name, values[-1] if values else default, wanted, why)
    for block, executable, why in THREADS:
        for attribute in known:
            if attribute.name == block and attribute.get("EXECUTABLE").rpartition("/")[2] == executable:
                yield Cap(str(oned), f"-t of {_title(attribute)}", _threads(attribute), WANTED_THREADS, why)
    text = disk.as_text(disk.read(sshd) or b"")
    for name, default, wanted, why in SSHD:
        found = re.search(rf"(?mi)^[ \t]*{name}[ \t=]+(\S+)", text)
        yield Cap(f"{sshd} of each host", name, found[1] if found else default, wanted, why)


def _title(attribute: Attribute) -> str:
    name = attribute.get("NAME")
    return f"{attribute.name} {name}" if name else attribute.name


def _threads(attribute: Attribute) -> str:
    found = re.search(r"(?:^|\s)(?:-t\s*|--threads[= ])(\d+)", attribute.get("ARGUMENTS"))
    return found[1] if found else "15"
