"""Filling a VM's disk with what a stream has, one section after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from drivers.base import Device, VmDiskDriver
from drivers.blocks import Blocks
from virtman.errors import NoRoom, StreamMisfit
from virtman.hostfiles import translate_os_errors
from virtman.names import TEMPORARY
from virtman.records import Snapshot
from virtman.steps import Step
from virtman.stream import Data, Header, Piece, Section, Zeros

_LOOKED = 64 << 20
"""Bytes, at most, that are written between two looks for room."""

START = f"{TEMPORARY}start"
"""The driver's snapshot of a disk that holds nothing yet, if sections have to begin there later."""


class OpenBlocks(Protocol):
    """How a disk is read and written (``drivers.blocks.open_blocks``)."""

    def __call__(self, vm: str, device: Device, *, write: bool = False) -> AbstractContextManager[Blocks]:
        """The open disk."""


def starts(header: Header) -> list[Section]:
    """The sections that differ from what the receiver has."""
    return [section for section in header.sections if section.parent == header.since]


class Receiver:
    """Fills the disk of ``vm``, at which nobody else works, and which holds what the stream begins with.

    ``base``: the snapshot that is, if it is one. ``taken``: the snapshots that were made. ``own``: the VM, which is
    arriving, wrote what comes just now, and so it may take what is kept free for what VMs write.
    """

    def __init__(
        self, vm: str, header: Header, base: Snapshot | None, snapshots: VmDiskDriver, opened: OpenBlocks, step: Step,
        *, own: bool,
    ) -> None:  # fmt: skip
        self._vm, self._header, self._base = vm, header, base
        self._snapshots, self._open, self._step = snapshots, opened, step
        self.taken: list[Snapshot] = []
        self._at = header.since
        """What the disk holds: the ``id`` of a section, or of the base."""
        self._own = own
        self._granted = 0
        """Bytes that may be written until room is looked for again."""

    def fill(self, pieces: Iterator[Piece], arrived: Callable[[int], None]) -> str | None:
        """Take all pieces that follow the header. Returns the name of the snapshot that the disk was last at, if any.

        ``arrived`` hears how many bytes of the disk each has. Raises BadStream, StreamMisfit, DriverError, NoRoom,
        HostTrouble.
        """
        self._require_room(self._header.data)
        again = self._base is None and len(starts(self._header)) > 1
        if again:
            self._snapshots.take(self._vm, START, None)
        next(pieces)  # which says that the first section begins
        for section in self._header.sections:
            self._go_to(section)
            self._write(pieces, arrived)
            self._step("receive:written")
            self._keep(section)
        for _nothing in pieces:
            pass
        if again:
            self._snapshots.drop(self._vm, START, None)
        return self._current()

    def _go_to(self, section: Section) -> None:
        """Let the disk hold what the section differs from, and have its size."""
        size = self._snapshots.open(self._vm).size
        if section.parent != self._at:
            size = self._snapshots.revert(self._vm, self._name(section.parent) or START).size
        if section.size < size:
            raise StreamMisfit(f"a section of the stream has {section.size} bytes, and what it is over has {size}")
        if section.size > size:
            self._snapshots.resize(self._vm, section.size, None)

    def _write(self, pieces: Iterator[Piece], arrived: Callable[[int], None]) -> None:
        """Write all of a section, up to the piece that ends it."""
        with translate_os_errors(f"writing the disk of vm {self._vm}"), ExitStack() as stack:
            blocks: Blocks | None = None
            for piece in pieces:
                if not isinstance(piece, Data | Zeros):
                    return
                if blocks is None:
                    blocks = stack.enter_context(self._open(self._vm, self._snapshots.open(self._vm), write=True))
                if isinstance(piece, Data):
                    self._take(len(piece.data))
                    blocks.write(piece.offset, piece.data)
                else:
                    blocks.zero(piece.offset, piece.length)
                arrived(piece.end - piece.offset)

    def _take(self, length: int) -> None:
        """Raises NoRoom, DriverError."""
        if self._granted < length:
            self._granted = min(self._require_room(length) // 2, _LOOKED)
        self._granted -= length

    def _require_room(self, needed: int) -> int:
        """The bytes that may be written. Raises NoRoom, DriverError."""
        spare = sys.maxsize if self._own else self._snapshots.spare()
        if needed > spare:
            raise NoRoom(
                f"no space left for the disk of vm {self._vm}: at least {-(-needed >> 20)} MiB are to come, and"
                f" {spare >> 20} MiB are free beside what is kept for what VMs write (virtman agent --reserve);"
                " make room on this host"
            )
        return spare

    def _keep(self, section: Section) -> None:
        self._at = section.id
        if section.name is None:
            return
        self._snapshots.take(self._vm, section.name, None)
        self._step("receive:kept")
        snapshot = Snapshot(
            name=section.name, parent=self._name(section.parent), size=section.size, taken=section.taken,
            state=section.state, id=section.id,
        )  # fmt: skip
        self.taken.append(snapshot)

    def _name(self, wanted: str | None) -> str | None:
        """The name of a snapshot by its ``id``."""
        known = self.taken if self._base is None else [self._base, *self.taken]
        return next((snapshot.name for snapshot in known if snapshot.id == wanted), None)

    def _current(self) -> str | None:
        last = self._header.sections[-1]
        return last.name or self._name(last.parent)
