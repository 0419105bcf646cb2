"""Operations: a change of one name is recorded, carried out, and ended after an error or a crash.

Each kind of operation has an entry in a table (``Kind``), and one runner carries all of them out. A caller begins an
operation by ``run``. The reconciler ends an operation that a crash cut off by ``resume``, and tries again by its
back-off until that succeeds (virtman/upkeep.py). Callers hold the lock of the name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from drivers.errors import DriverError
from virtman.errors import HostTrouble, NoRoom, VirtmanError
from virtman.records import Record, RecordStore
from virtman.steps import Step

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)
C = TypeVar("C")
T = TypeVar("T")


def _stays(_context: object, _record: object, _error: Exception | None) -> None:
    """An operation that nothing undoes: it is tried again."""


@dataclass(frozen=True)
class Kind(Generic[C, R]):
    """How operations of one kind are carried out in a context ``C``: that of all VMs, say.

    ``finish``: takes every step that is still to be taken, and writes the settled record, or removes it. A step that
    was taken before does nothing. Without a ``finish`` the operation is undone after a crash.
    ``undo``: gives the record that replaces the one of an operation that failed: a settled one, or one with another
    operation, which is finished at once. If ``undo`` returns None, the record stays, and the operation is tried again.
    ``gives_up``: errors after which an operation that a crash cut off is undone. Any other error has it tried again.
    ``makes_room``: the operation goes on where it cannot be recorded.
    """

    finish: Callable[[C, R], Any] | None = None
    undo: Callable[[C, R, Exception | None], R | None] = _stays
    gives_up: tuple[type[Exception], ...] = ()
    makes_room: bool = False


class Operations(Generic[C, R]):
    """Carries out the operations of the records of one kind. ``what``: names these for logs, "vm" say."""

    def __init__(
        self, what: str, records: RecordStore[R], kinds: Mapping[str, Kind[C, R]], context: C, step: Step
    ) -> None:  # fmt: skip
        self._what, self._records, self._kinds = what, records, kinds
        self._context, self._step = context, step

    def run(self, record: R, act: Callable[[R], T] | None = None) -> T:
        """Record an operation that begins, and carry it out. Raises as ``begin`` and ``carry_out``."""
        self.begin(record)
        return self.carry_out(record, act)

    def begin(self, record: R) -> None:
        """Record an operation that begins. Raises NoRoom, HostTrouble, unless its kind makes room."""
        if self._kinds[record.kind].makes_room:
            self.note(record)
        else:
            self._records.put(record.name, record)
        self._step(f"{record.kind.replace(' ', '-')}:recorded")

    def carry_out(self, record: R, act: Callable[[R], T] | None = None) -> T:
        """Carry out an operation that is recorded: by ``act``, else as its kind finishes it.

        After an error the operation is undone as its kind says, now or later, and the error is raised.
        """
        try:
            return act(record) if act is not None else self._finish(record)
        except (VirtmanError, DriverError) as error:
            log.warning("%s %s: %s failed: %s", self._what, record.name, record.kind, error)
            self._undo_or_later(record, error)
            raise

    def resume(self, record: R) -> None:
        """Finish or undo an operation that was cut off. Raises VirtmanError, DriverError: it is to be tried again."""
        kind = self._kinds[record.kind]
        log.warning("%s %s: an operation was cut off: %s", self._what, record.name, record.kind)
        if kind.finish is None:
            self._undo(record, None)
            return
        try:
            kind.finish(self._context, record)
        except kind.gives_up as error:
            log.warning("%s %s: %s is given up: %s", self._what, record.name, record.kind, error)
            self._undo_or_later(record, error)

    def note(self, record: R) -> None:
        """Write a record, or keep it in memory where it cannot be written, until one can be."""
        try:
            self._records.put(record.name, record)
        except (NoRoom, HostTrouble) as error:
            log.warning("%s %s: its record is kept in memory: %s", self._what, record.name, error)
            self._records.remember(record.name, record)

    def _finish(self, record: R) -> Any:
        finish = self._kinds[record.kind].finish
        if finish is None:
            raise ValueError(f"{record.name}: {record.kind} cannot be finished without its caller")
        return finish(self._context, record)

    def _undo_or_later(self, record: R, error: Exception) -> None:
        try:
            self._undo(record, error)
        except (VirtmanError, DriverError) as second:
            log.error("%s %s: undoing %s failed, and is tried again later: %s",
                      self._what, record.name, record.kind, second)  # fmt: skip

    def _undo(self, record: R, error: Exception | None) -> None:
        """``error``: what the operation failed with; None after a crash."""
        record = self._records.get(record.name) or record  # it may have got further
        back = self._kinds[record.kind].undo(self._context, record, error)
        if back is not None:
            self.note(back)
            if back.operation is not None:
                self._finish(back)
