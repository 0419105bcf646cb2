"""Filling a VM's disk with what a stream has, one section after the other."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack

from drivers.blocks import Blocks
from virtman.errors import Conflict, NoRoom
from virtman.hostfiles import translate_os_errors
from virtman.names import TEMPORARY
from virtman.records import Snapshot
from virtman.stream import Contents, Data, Header, Section
from virtman.vms import Vms

_LOOKED = 64 << 20
"""Bytes, at most, that are written between two checks of the room."""

START = f"{TEMPORARY}start"
"""The driver's snapshot of a disk that holds nothing yet, if sections have to begin there later."""


def starts(header: Header) -> list[Section]:
    """The sections that differ from what the receiver has."""
    return [section for section in header.sections if section.parent == header.since]


class Receiver:
    """Fills the disk of ``vm``, whose lock the caller holds, and which holds what the stream begins with.

    ``base``: the snapshot that is, if it is one. ``taken``: the snapshots that were made. ``own``: the VM, which is
    arriving, wrote what comes just now, and so it may take what is kept free for what VMs write.
    """

    def __init__(self, vms: Vms, vm: str, header: Header, base: Snapshot | None, *, own: bool = False) -> None:
        self._vms, self._vm, self._header, self._base, self._own = vms, vm, header, base, own
        self.taken: list[Snapshot] = []
        self._at = header.since
        """What the disk holds: the ``id`` of a section, or of the base."""
        self._granted = 0
        """Bytes that may be written before the room is checked again."""

    @property
    def current(self) -> str | None:
        """The name of the snapshot that the whole disk was last at, if any."""
        last = self._header.sections[-1]
        return last.name or self._name(last.parent)

    def fill(self, sections: Iterable[tuple[Section, Contents]]) -> None:
        """Take all sections. Raises BadStream, Conflict, DriverError, NoRoom, HostTrouble."""
        self._require_room(self._header.data)
        disks = self._vms.vmdisks
        again = self._base is None and len(starts(self._header)) > 1
        if again:
            disks.take(self._vm, START, None)
        for section, contents in sections:
            self._go_to(section)
            self._write(contents)
            self._vms.step("receive:written")
            self._keep(section)
        if again:
            disks.drop(self._vm, START, None)

    def _go_to(self, section: Section) -> None:
        """Let the disk hold what the section differs from, and have its size."""
        disks = self._vms.vmdisks
        size = disks.open(self._vm).size
        if section.parent != self._at:
            size = disks.revert(self._vm, self._name(section.parent) or START).size
        if section.size < size:
            raise Conflict(f"a section of the stream has {section.size} bytes, and what it is over has {size}")
        if section.size > size:
            disks.resize(self._vm, section.size, None)

    def _write(self, contents: Contents) -> None:
        """Write all of a section. A disk that a section does not change is not opened."""
        with translate_os_errors(f"writing the disk of vm {self._vm}"), ExitStack() as stack:
            blocks: Blocks | None = None
            for piece in contents:
                if blocks is None:
                    disk = self._vms.vmdisks.open(self._vm)
                    blocks = stack.enter_context(self._vms.open_blocks(self._vm, disk, write=True))
                if isinstance(piece, Data):
                    self._take(len(piece.data))
                    blocks.write(piece.offset, piece.data)
                else:
                    blocks.zero(piece.offset, piece.length)

    def _take(self, length: int) -> None:
        """Raises NoRoom, DriverError."""
        if self._granted < length:
            self._granted = min(self._require_room(length) // 2, _LOOKED)
        self._granted -= length

    def _require_room(self, needed: int) -> int:
        """The bytes that may be written. Raises NoRoom, DriverError."""
        spare = sys.maxsize if self._own else self._vms.vmdisks.spare()
        if needed > spare:
            raise NoRoom(
                f"no space left for the disk of vm {self._vm}: at least {-(-needed >> 20)} MiB are to come, and"
                f" {spare >> 20} MiB are free beside what is kept for what VMs write (virtman agent --reserve);"
                " make room on this host"
            )
        return spare

    def _keep(self, section: Section) -> None:
        """Take the section's snapshot, if the section is one's."""
        self._at = section.id
        if section.name is None:
            return
        self._vms.vmdisks.take(self._vm, section.name, None)
        self._vms.step("receive:kept")
        parent = self._name(section.parent)
        self.taken.append(Snapshot(**section.model_dump(exclude={"parent"}), parent=parent))

    def _name(self, wanted: str | None) -> str | None:
        """The name of a snapshot by its ``id``."""
        known = self.taken if self._base is None else [self._base, *self.taken]
        return next((snapshot.name for snapshot in known if snapshot.id == wanted), None)
